// The cheapest placement of one prompt. `terms_of` and `evaluate` in placement.py say what each term
// means; `choice.py` has the same structures.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

struct Fleet {  // columns, one row a slot
  int64_t num_slots;
  const int64_t *kv_class;
  const bool *can_prefill, *can_decode, *usable;
  const double *hold_until_s, *prefill_tokens_per_s, *prefill_measured_s, *decode_step_s,
      *decode_measured_s, *handoff_bytes_per_s, *kv_bytes_per_token, *queued_tokens, *head_tokens,
      *head_since_s, *running, *max_running, *free_tokens, *longest_request, *max_held_tokens,
      *unquarantined_tokens;
  const float *link_slowness;  // [writer, reader]
};

struct Query {
  int64_t num_tokens, max_new_tokens, kv_class, least_new_tokens, preferred, num_failed;
  const int64_t *cached_tokens, *failed;
  const bool *reserved;
  bool trusts_links, may_be_local, must_be_local;
  double now_s, measured_since_s, decode_horizon_tokens, local_prefill_weight, handoff_overhead_s,
      handoff_overlap, retry_penalty_s, tie_tolerance_s, session_tolerance_s;
  double decode_draw, prefill_draw;  // from 0 to 1, for ties
};

struct Found {
  int64_t prefill_slot, decode_slot;  // prefill_slot -1: the decode worker prefills
  double cost_s, queue_s, prefill_s, transfer_s, decode_s;
};

struct Speeds {  // for workers that were never measured, or too long ago
  double fastest_rate = 0.0, shortest_step = INFINITE;
};

Speeds best_speeds(const Fleet &fleet, int64_t kv_class) {
  Speeds best;
  for (int64_t slot = 0; slot < fleet.num_slots; slot++) {
    if (!fleet.usable[slot] || fleet.kv_class[slot] != kv_class) continue;
    if (std::isfinite(fleet.prefill_measured_s[slot]))
      best.fastest_rate = std::max(best.fastest_rate, fleet.prefill_tokens_per_s[slot]);
    if (std::isfinite(fleet.decode_measured_s[slot]))
      best.shortest_step = std::min(best.shortest_step, fleet.decode_step_s[slot]);
  }
  return best;
}

bool is_old(const Query &query, double measured_s) {
  return !std::isfinite(measured_s) || measured_s < query.measured_since_s;
}

// Candidates as columns, in the order of their slots.
struct Writers {
  std::vector<int64_t> slot;
  std::vector<double> queue_s, prefill_s, penalty_s;
};

struct Readers {
  std::vector<int64_t> slot;
  std::vector<double> lacks_bytes, queue_s, prefill_s, decode_s, local_decode_s, penalty_s;
  std::vector<double> writer_s;  // what the cheapest other worker costs before the decode begins
  std::vector<double> s_per_byte;  // of the links from one writer
};

// What moving a prompt's KV adds to its prefill, beside the overhead.
double exposed_s(const Query &query, double num_bytes, double s_per_byte, double prefill_s) {
  double move = num_bytes * s_per_byte, overlap = query.handoff_overlap;
  return std::max((1 - overlap) * move, move - overlap * prefill_s);
}

double s_per_byte(const Fleet &fleet, const Query &query, int64_t writer, int64_t reader) {
  double at_writers_rate = 1.0 / fleet.handoff_bytes_per_s[writer];
  if (!query.trusts_links) return at_writers_rate;
  return at_writers_rate * fleet.link_slowness[writer * fleet.num_slots + reader];
}

double penalty_s(const Query &query, int64_t slot) {
  const int64_t *end = query.failed + query.num_failed;
  return std::find(query.failed, end, slot) == end ? 0.0 : query.retry_penalty_s;
}

void find_candidates(const Fleet &fleet, const Query &query, Writers &writers, Readers &readers) {
  Speeds best = best_speeds(fleet, query.kv_class);
  const double num_tokens = query.num_tokens;
  for (int64_t slot = 0; slot < fleet.num_slots; slot++) {
    double left = fleet.unquarantined_tokens[slot], held = fleet.max_held_tokens[slot];
    if (!fleet.usable[slot] || fleet.kv_class[slot] != query.kv_class ||
        fleet.hold_until_s[slot] > query.now_s || (num_tokens > left && held > left))
      continue;
    double uncached = num_tokens - query.cached_tokens[slot];
    double rate = fleet.prefill_tokens_per_s[slot], step = fleet.decode_step_s[slot];
    if (best.fastest_rate > 0 && is_old(query, fleet.prefill_measured_s[slot]))
      rate = best.fastest_rate;
    if (best.shortest_step < INFINITE && is_old(query, fleet.decode_measured_s[slot]))
      step = best.shortest_step;
    double done = std::min(fleet.head_tokens[slot],
                           rate * std::max(0.0, query.now_s - fleet.head_since_s[slot]));
    double queue_s = std::max(0.0, fleet.queued_tokens[slot] - done) / rate;
    double prefill_s = std::max(1.0, uncached) / rate;
    if (fleet.can_prefill[slot] && fleet.longest_request[slot] > num_tokens) {
      writers.slot.push_back(slot);
      writers.queue_s.push_back(queue_s);
      writers.prefill_s.push_back(prefill_s);
      writers.penalty_s.push_back(penalty_s(query, slot));
    }
    double running = fleet.running[slot], most = fleet.max_running[slot];
    bool has_room = running == 0 || fleet.free_tokens[slot] >=
                                        std::min(uncached + query.max_new_tokens, held);
    if (!fleet.can_decode[slot] || !has_room || running >= most ||
        fleet.longest_request[slot] < num_tokens + query.least_new_tokens ||
        (query.reserved && query.reserved[slot]))
      continue;
    double share = (running + 1) / most, decode_s = query.decode_horizon_tokens * step * share;
    readers.slot.push_back(slot);
    readers.lacks_bytes.push_back(std::max(0.0, uncached * fleet.kv_bytes_per_token[slot]));
    readers.queue_s.push_back(queue_s);
    readers.prefill_s.push_back(prefill_s);
    readers.decode_s.push_back(decode_s);
    // A decode worker's compute is dearer than a prefill worker's: streams wait for it.
    readers.local_decode_s.push_back(decode_s +
                                     prefill_s * (query.local_prefill_weight - 1.0 + share));
    readers.penalty_s.push_back(penalty_s(query, slot));
  }
}

// What the cheapest other worker costs each decode worker. Every pair is looked at, one writer at a
// time, so that the compiler can take several decode workers at once.
void price_writers(const Fleet &fleet, const Query &query, const Writers &writers,
                   Readers &readers) {
  size_t count = readers.slot.size(), own = 0;
  readers.writer_s.assign(count, INFINITE);
  readers.s_per_byte.resize(count);
  double *least = readers.writer_s.data(), *links = readers.s_per_byte.data();
  const double *lacks = readers.lacks_bytes.data();
  for (size_t row = 0; row < writers.slot.size(); row++) {
    int64_t writer = writers.slot[row];
    while (own < count && readers.slot[own] < writer) own++;
    bool is_reader = own < count && readers.slot[own] == writer;
    double kept = is_reader ? least[own] : 0.0;
    double prefill_s = writers.prefill_s[row];
    double alone = writers.queue_s[row] + prefill_s + writers.penalty_s[row] +
                   query.handoff_overhead_s;
    for (size_t column = 0; column < count; column++)
      links[column] = s_per_byte(fleet, query, writer, readers.slot[column]);
    for (size_t column = 0; column < count; column++) {
      double added = exposed_s(query, lacks[column], links[column], prefill_s);
      least[column] = std::min(least[column], alone + added);
    }
    if (is_reader) least[own] = kept;  // that is local prefill
  }
}

// The `draw` part along those that are marked.
template <class Marked>
size_t pick(size_t count, double draw, Marked marked) {
  size_t num_marked = 0;
  for (size_t at = 0; at < count; at++) num_marked += marked(at);
  size_t left = std::min(num_marked - 1, size_t(draw * num_marked));
  for (size_t at = 0;; at++)
    if (marked(at) && !left--) return at;
}

}  // namespace

extern "C" int baton_cheapest(const Fleet *fleet_, const Query *query_, Found *found) {
  const Fleet &fleet = *fleet_;
  const Query &query = *query_;
  Writers writers;
  Readers readers;
  find_candidates(fleet, query, writers, readers);
  size_t count = readers.slot.size(), num_writers = writers.slot.size();
  if (!num_writers) readers.local_decode_s = readers.decode_s;
  if (query.must_be_local) num_writers = 0, writers = {};
  price_writers(fleet, query, writers, readers);
  std::vector<double> total(count), local(count, INFINITE);
  double least = INFINITE;
  for (size_t at = 0; at < count; at++) {
    double penalty = readers.penalty_s[at];
    if (query.may_be_local)
      local[at] = readers.queue_s[at] + readers.prefill_s[at] + readers.local_decode_s[at] + penalty;
    total[at] = std::min(local[at], readers.writer_s[at] + readers.decode_s[at] + penalty);
    least = std::min(least, total[at]);
  }
  if (least == INFINITE) return 0;
  double bound = least + query.tie_tolerance_s;
  size_t at = std::find(readers.slot.begin(), readers.slot.end(), query.preferred) -
              readers.slot.begin();  // a session stays where it was
  if (at == count || total[at] > least + query.session_tolerance_s)
    at = pick(count, query.decode_draw, [&](size_t each) { return total[each] <= bound; });
  int64_t reader = readers.slot[at];
  std::vector<double> costs, moves;
  for (size_t row = 0; row < num_writers; row++) {
    double prefill_s = writers.prefill_s[row];
    double link = s_per_byte(fleet, query, writers.slot[row], reader);
    moves.push_back(query.handoff_overhead_s +
                    exposed_s(query, readers.lacks_bytes[at], link, prefill_s));
    double cost = writers.queue_s[row] + prefill_s + moves[row] + writers.penalty_s[row] +
                  readers.decode_s[at] + readers.penalty_s[at];
    costs.push_back(writers.slot[row] == reader ? INFINITE : cost);
  }
  costs.push_back(local[at]);
  bound = *std::min_element(costs.begin(), costs.end()) + query.tie_tolerance_s;
  size_t row =
      pick(costs.size(), query.prefill_draw, [&](size_t each) { return costs[each] <= bound; });
  if (row == num_writers)
    *found = {-1,  reader, costs[row], readers.queue_s[at], readers.prefill_s[at],
              0.0, readers.local_decode_s[at]};
  else
    *found = {writers.slot[row], reader, costs[row], writers.queue_s[row], writers.prefill_s[row],
              moves[row], readers.decode_s[at]};
  return 1;
}
