// The cheapest placements of one prompt. Python computes what concerns one worker (`terms/`) and hands
// over its sums; here they meet what concerns a pair, the transfer. `choice.py` has the same structures.
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
      *decode_measured_s, *handoff_bytes_per_s, *kv_bytes_per_token, *running, *max_running,
      *free_tokens, *longest_request, *max_held_tokens, *unquarantined_tokens;
  const float *link_slowness;  // [writer, reader]
};

constexpr double OVERHEAD_S = 0.002;  // of a handoff: a reservation and an acknowledgement
constexpr double OVERLAP = 0.9;  // share of a move that can hide behind the prefill, and of that

struct Query {
  int64_t num_tokens, max_new_tokens, kv_class, least_new_tokens;
  const int64_t *cached_tokens;
  const bool *reserved;
  const double *sums_s;  // [AT_PREFILL and so on, slots], and behind them the prefill itself
  bool trusts_links, may_be_local, must_be_local;
  double now_s, tie_tolerance_s;
  double decode_draw, prefill_draw;  // from 0 to 1, for ties
};

enum { AT_PREFILL, AT_DECODE, AT_ITSELF, AT_EACH, PREFILL };  // rows of `sums_s`

struct Found {
  int64_t prefill_slot, decode_slot;  // prefill_slot -1: the decode worker prefills
  double cost_s, transfer_s;
  bool counts_itself;  // terms for a worker that prefills though another could
};

bool is_cheaper(const Found &a, const Found &b) { return a.cost_s < b.cost_s; }

bool is_old(double measured_s, double since_s) {
  return !std::isfinite(measured_s) || measured_s < since_s;
}

// Candidates as columns, in the order of their slots.
struct Writers {
  std::vector<int64_t> slot;
  std::vector<double> alone_s, prefill_s;
};

struct Readers {
  std::vector<int64_t> slot;
  std::vector<double> lacks_bytes, decode_s, local_s;
  std::vector<double> writer_s;  // what the cheapest other worker costs before the decode begins
  std::vector<double> s_per_byte;  // of the links from one writer
};

// What moving a prompt's KV adds to its prefill, beside the overhead.
double exposed_s(const Query &query, double num_bytes, double s_per_byte, double prefill_s) {
  double move = num_bytes * s_per_byte, overlap = OVERLAP;
  return std::max((1 - overlap) * move, move - overlap * prefill_s);  // the last layers never hide
}

double s_per_byte(const Fleet &fleet, const Query &query, int64_t writer, int64_t reader) {
  double at_writers_rate = 1.0 / fleet.handoff_bytes_per_s[writer];
  if (!query.trusts_links) return at_writers_rate;
  return at_writers_rate * fleet.link_slowness[writer * fleet.num_slots + reader];
}

void find_candidates(const Fleet &fleet, const Query &query, Writers &writers, Readers &readers) {
  const double num_tokens = query.num_tokens;
  auto sum_s = [&](int which, int64_t slot) { return query.sums_s[which * fleet.num_slots + slot]; };
  for (int64_t slot = 0; slot < fleet.num_slots; slot++) {
    double left = fleet.unquarantined_tokens[slot], held = fleet.max_held_tokens[slot];
    if (!fleet.usable[slot] || fleet.kv_class[slot] != query.kv_class ||
        fleet.hold_until_s[slot] > query.now_s || (num_tokens > left && held > left))
      continue;
    double uncached = num_tokens - query.cached_tokens[slot];
    double each_s = sum_s(AT_EACH, slot), alone_s = sum_s(AT_PREFILL, slot) + each_s;
    if (fleet.can_prefill[slot] && fleet.longest_request[slot] > num_tokens && alone_s < INFINITE) {
      writers.slot.push_back(slot);
      writers.alone_s.push_back(alone_s + OVERHEAD_S);
      writers.prefill_s.push_back(sum_s(PREFILL, slot));
    }
    double running = fleet.running[slot], decode_s = sum_s(AT_DECODE, slot);
    bool has_room = running == 0 || fleet.free_tokens[slot] >=
                                        std::min(uncached + query.max_new_tokens, held);
    if (!fleet.can_decode[slot] || !has_room || running >= fleet.max_running[slot] ||
        fleet.longest_request[slot] < num_tokens + query.least_new_tokens ||
        (query.reserved && query.reserved[slot]) || decode_s + each_s == INFINITE)
      continue;
    readers.slot.push_back(slot);
    readers.lacks_bytes.push_back(std::max(0.0, uncached * fleet.kv_bytes_per_token[slot]));
    readers.decode_s.push_back(decode_s + each_s);
    readers.local_s.push_back(query.may_be_local ? alone_s + decode_s : INFINITE);
  }
  if (!writers.slot.empty())
    for (size_t at = 0; at < readers.slot.size(); at++)
      readers.local_s[at] += sum_s(AT_ITSELF, readers.slot[at]);
}

// What the cheapest other worker costs each decode worker. A writer is left out if it cannot be
// cheaper for any of them, even for the one that lacks least over its fastest link; so the one that
// promises most goes first. One writer at a time, so that the compiler takes several decode workers at
// once.
void price_writers(const Fleet &fleet, const Query &query, const Writers &writers,
                   Readers &readers) {
  size_t count = readers.slot.size(), num_writers = writers.slot.size();
  readers.writer_s.assign(count, INFINITE);
  readers.s_per_byte.resize(count);
  if (!count || !num_writers) return;
  double *least = readers.writer_s.data(), *links = readers.s_per_byte.data();
  const double *lacks = readers.lacks_bytes.data();
  double fewest = *std::min_element(lacks, lacks + count), worst = INFINITE;
  std::vector<double> at_best;  // of each writer
  for (size_t row = 0; row < num_writers; row++) {
    double link = query.trusts_links ? 0.0 : 1.0 / fleet.handoff_bytes_per_s[writers.slot[row]];
    at_best.push_back(writers.alone_s[row] + exposed_s(query, fewest, link, writers.prefill_s[row]));
  }
  size_t first = std::min_element(at_best.begin(), at_best.end()) - at_best.begin();
  for (size_t turn = 0; turn < num_writers; turn++) {
    size_t row = turn == 0 ? first : turn <= first ? turn - 1 : turn;
    if (at_best[row] >= worst) continue;
    int64_t writer = writers.slot[row];
    double alone = writers.alone_s[row], prefill_s = writers.prefill_s[row];
    size_t own = std::lower_bound(readers.slot.begin(), readers.slot.end(), writer) -
                 readers.slot.begin();
    bool is_reader = own < count && readers.slot[own] == writer;
    double kept = is_reader ? least[own] : 0.0;
    for (size_t column = 0; column < count; column++)
      links[column] = s_per_byte(fleet, query, writer, readers.slot[column]);
    for (size_t column = 0; column < count; column++) {
      double added = exposed_s(query, lacks[column], links[column], prefill_s);
      least[column] = std::min(least[column], alone + added);
    }
    if (is_reader) least[own] = kept;  // that is local prefill
    if ((turn & (turn + 1)) == 0) worst = *std::max_element(least, least + count);  // seldom: it is slow
  }
}

// Every way to prefill for one decode worker: by each writer, and last by itself.
std::vector<Found> ways(const Fleet &fleet, const Query &query, const Writers &writers,
                        const Readers &readers, size_t at) {
  std::vector<Found> found;
  int64_t reader = readers.slot[at];
  for (size_t row = 0; row < writers.slot.size() && !query.must_be_local; row++) {
    int64_t writer = writers.slot[row];
    if (writer == reader) continue;
    double added = exposed_s(query, readers.lacks_bytes[at],
                             s_per_byte(fleet, query, writer, reader), writers.prefill_s[row]);
    found.push_back({writer, reader, writers.alone_s[row] + added + readers.decode_s[at],
                     OVERHEAD_S + added, false});
  }
  found.push_back({-1, reader, readers.local_s[at], 0.0, !writers.slot.empty()});
  return found;
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

// Speeds to reckon with, as choice.py says.
extern "C" void baton_speeds(const Fleet *fleet, int64_t kv_class, double since_s, double *rates,
                             double *steps) {
  double fastest = 0.0, shortest = INFINITE;
  for (int64_t slot = 0; slot < fleet->num_slots; slot++) {
    if (!fleet->usable[slot] || fleet->kv_class[slot] != kv_class) continue;
    if (std::isfinite(fleet->prefill_measured_s[slot]))
      fastest = std::max(fastest, fleet->prefill_tokens_per_s[slot]);
    if (std::isfinite(fleet->decode_measured_s[slot]))
      shortest = std::min(shortest, fleet->decode_step_s[slot]);
  }
  for (int64_t slot = 0; slot < fleet->num_slots; slot++) {
    bool is_best = fastest > 0 && is_old(fleet->prefill_measured_s[slot], since_s);
    rates[slot] = is_best ? fastest : fleet->prefill_tokens_per_s[slot];
    is_best = shortest < INFINITE && is_old(fleet->decode_measured_s[slot], since_s);
    steps[slot] = is_best ? shortest : fleet->decode_step_s[slot];
  }
}

extern "C" int baton_cheapest(const Fleet *fleet, const Query *query, Found *found) {
  Writers writers;
  Readers readers;
  find_candidates(*fleet, *query, writers, readers);
  size_t count = readers.slot.size();
  if (!query->must_be_local)
    price_writers(*fleet, *query, writers, readers);
  else
    readers.writer_s.assign(count, INFINITE);
  std::vector<double> total(count);
  double least = INFINITE;
  for (size_t at = 0; at < count; at++) {
    total[at] = std::min(readers.local_s[at], readers.writer_s[at] + readers.decode_s[at]);
    least = std::min(least, total[at]);
  }
  if (least == INFINITE) return 0;
  double bound = least + query->tie_tolerance_s;
  size_t at = pick(count, query->decode_draw, [&](size_t each) { return total[each] <= bound; });
  std::vector<Found> each_way = ways(*fleet, *query, writers, readers, at);
  bound = std::min_element(each_way.begin(), each_way.end(), is_cheaper)->cost_s +
          query->tie_tolerance_s;
  *found = each_way[pick(each_way.size(), query->prefill_draw,
                         [&](size_t each) { return each_way[each].cost_s <= bound; })];
  return 1;
}

// All candidates, cheapest first, at most `limit`; returns how many.
extern "C" int64_t baton_ranked(const Fleet *fleet, const Query *query, Found *found,
                                int64_t limit) {
  Writers writers;
  Readers readers;
  find_candidates(*fleet, *query, writers, readers);
  std::vector<Found> all;
  for (size_t at = 0; at < readers.slot.size(); at++)
    for (const Found &way : ways(*fleet, *query, writers, readers, at))
      if (way.cost_s < INFINITE) all.push_back(way);
  limit = std::min<int64_t>(limit, all.size());
  std::partial_sort(all.begin(), all.begin() + limit, all.end(), is_cheaper);
  std::copy_n(all.begin(), limit, found);
  return limit;
}
