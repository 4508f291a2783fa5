// The prefix index. prefix_index.py says what each function means.
//
// Blocks are nodes in one array, found by hash through a table of node numbers. Node 0 is none. A
// node has two masks of slots: who holds the block, and for whom it is reachable. A block that nobody
// holds stays as long as it is the parent of another.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

namespace {

using Words = std::vector<uint64_t>;

struct Hash {
  uint64_t low, high;
  explicit Hash(const uint8_t *bytes) { std::memcpy(this, bytes, sizeof *this); }
  Hash(uint64_t low, uint64_t high) : low(low), high(high) {}
  bool operator==(const Hash &other) const { return low == other.low && high == other.high; }
};

constexpr size_t HASH_BYTES = sizeof(Hash);

// From hash to node, by linear probing. Keyed, so that no client can aim at one bucket.
class Table {
 public:
  template <class Equal>
  uint32_t find(Hash hash, Equal equal) const {
    uint32_t tag = tag_of(hash);
    for (size_t at = tag & mask();; at = (at + 1) & mask()) {
      const Bucket &bucket = buckets_[at];
      if (!bucket.node) return 0;
      if (bucket.tag == tag && equal(bucket.node)) return bucket.node;
    }
  }
  void prefetch(Hash hash) const { __builtin_prefetch(&buckets_[tag_of(hash) & mask()]); }
  void add(Hash hash, uint32_t node) {
    if (++size_ * 2 > buckets_.size()) grow();
    put({node, tag_of(hash)});
  }
  void remove(Hash hash, uint32_t node) {
    size_t hole = tag_of(hash) & mask();
    while (buckets_[hole].node != node) hole = (hole + 1) & mask();
    for (size_t at = hole;;) {  // move up what was pushed behind its own bucket
      at = (at + 1) & mask();
      if (!buckets_[at].node) break;
      size_t wanted = buckets_[at].tag & mask();
      if (((at - wanted) & mask()) >= ((at - hole) & mask())) buckets_[hole] = buckets_[at], hole = at;
    }
    buckets_[hole].node = 0;
    size_--;
  }

 private:
  struct Bucket {
    uint32_t node = 0, tag = 0;
  };
  size_t mask() const { return buckets_.size() - 1; }
  uint32_t tag_of(Hash hash) const { return (hash.low * low_key_ + hash.high * high_key_) >> 32; }
  void put(Bucket bucket) {
    size_t at = bucket.tag & mask();
    while (buckets_[at].node) at = (at + 1) & mask();
    buckets_[at] = bucket;
  }
  void grow() {
    std::vector<Bucket> old(2 * buckets_.size());
    old.swap(buckets_);
    for (const Bucket &bucket : old)
      if (bucket.node) put(bucket);
  }
  static uint64_t odd_key() {
    std::random_device device;
    return (uint64_t(device()) << 32 | device()) | 1;
  }
  uint64_t low_key_ = odd_key(), high_key_ = odd_key();
  std::vector<Bucket> buckets_ = std::vector<Bucket>(1024);
  size_t size_ = 0;
};

// How far each slot holds the chain: binary search for all slots at once, which splits where they
// part. `holders(hash, mask)` writes who holds a block; false: nobody.
template <class Holders>
void leading_blocks(const uint8_t *hashes, size_t count, size_t num_slots, int64_t *found,
                    Holders holders) {
  size_t words = (num_slots + 63) / 64;
  struct Range {
    size_t low, high;
  };
  std::vector<Range> ranges = {{0, count}};
  Words masks(words, ~uint64_t(0)), there(words);  // of the ranges, one after another
  if (num_slots % 64) masks[words - 1] = (uint64_t(1) << num_slots % 64) - 1;
  while (!ranges.empty()) {
    auto [low, high] = ranges.back();
    ranges.pop_back();
    uint64_t *mask = &masks[ranges.size() * words];
    if (low == high) {
      for (size_t word = 0; low && word < words; word++)
        for (uint64_t left = mask[word]; left; left &= left - 1) {
          int64_t &best = found[word * 64 + __builtin_ctzll(left)];
          best = std::max<int64_t>(best, low);
        }
      continue;
    }
    size_t middle = (low + high + 1) / 2;
    std::fill(there.begin(), there.end(), 0);
    bool some = holders(Hash(hashes + (middle - 1) * HASH_BYTES), there.data()), all = true;
    uint64_t any = 0;
    for (size_t word = 0; some && word < words; word++) {
      there[word] &= mask[word];
      any |= there[word];
      all &= there[word] == mask[word];
    }
    if (!some || !any) {
      ranges.push_back({low, middle - 1});
    } else if (all) {
      ranges.push_back({middle, high});
    } else {
      masks.resize((ranges.size() + 2) * words);
      mask = &masks[ranges.size() * words];
      for (size_t word = 0; word < words; word++) {
        mask[words + word] = there[word];
        mask[word] &= ~there[word];
      }
      ranges.push_back({low, middle - 1});
      ranges.push_back({middle, high});
    }
  }
}

class Blocks {
 public:
  size_t num_known = 0;  // blocks that somebody holds

  int64_t num_held(size_t slot) const { return slot < counts_.size() ? counts_[slot] : 0; }

  void store(size_t slot, const uint8_t *parent, const uint8_t *hashes, size_t count) {
    make_room_for(slot);
    uint32_t before = 0;
    for (size_t index = 0; index < count; index++) {
      if (index + 4 < count) table_.prefetch(Hash(hashes + (index + 4) * HASH_BYTES));
      uint32_t node = find_or_add(Hash(hashes + index * HASH_BYTES));
      if (!is_held(node)) {
        num_known++;
        if (index || parent) link(node, index ? before : find_or_add(Hash(parent)));
      }
      if (!has(held(node), slot)) {
        set(held(node), slot);
        counts_[slot]++;
        reach(node, slot);
      }
      before = node;
    }
  }

  void remove(size_t slot, const uint8_t *hashes, size_t count) {
    if (!num_held(slot)) return;
    for (size_t index = 0; index < count; index++) {
      uint32_t node = find(Hash(hashes + index * HASH_BYTES));
      if (!node || !has(held(node), slot)) continue;
      counts_[slot]--;
      unset(held(node), slot);
      if (has(reachable(node), slot)) unreach(node, slot);
      if (!is_held(node)) forget(node);
    }
  }

  void clear(size_t slot) {
    if (!num_held(slot)) return;
    for (uint32_t node = 1; node < num_nodes_; node++) {
      if (!has(held(node), slot)) continue;
      unset(held(node), slot);
      unset(reachable(node), slot);
      if (!is_held(node)) forget(node);
    }
    counts_[slot] = 0;
  }

  void lookup(const uint8_t *hashes, size_t count, int64_t *found, size_t num_slots) {
    size_t words = std::min(words_, (num_slots + 63) / 64);
    leading_blocks(hashes, count, num_slots, found, [&](Hash hash, uint64_t *mask) {
      uint32_t node = find(hash);
      if (node) std::memcpy(mask, reachable(node), words * sizeof *mask);
      return node != 0;
    });
  }

  const char *fault() {
    size_t known = 0;
    std::vector<int64_t> counts(counts_.size());
    for (uint32_t node = 1; node < num_nodes_; node++) {
      Node &own = at(node);
      if (own.is_free) continue;
      if (find(own.hash) != node) return "a block is not found by its hash";
      if (!is_held(node) && !own.child) return "a block is neither held nor a parent";
      if (!is_held(node) && own.parent) return "a block that nobody holds has a parent";
      known += is_held(node);
      for (uint32_t child = own.child; child; child = at(child).next)
        if (at(child).parent != node) return "a child has another parent";
      for (size_t word = 0; word < words_; word++) {
        uint64_t above = own.parent ? reachable(own.parent)[word] : ~uint64_t(0);
        if (own.parent == node) above = 0;
        if (reachable(node)[word] != (held(node)[word] & above)) return "a reachable mask is wrong";
        for (uint64_t left = held(node)[word]; left; left &= left - 1)
          counts[word * 64 + __builtin_ctzll(left)]++;
      }
    }
    if (known != num_known) return "the number of blocks is wrong";
    return counts == counts_ ? nullptr : "a slot's number of blocks is wrong";
  }

 private:
  struct Node {  // its masks follow it
    Hash hash;
    uint32_t parent, child, next, previous;  // child: the first; next, previous: of one parent's
    uint64_t is_free;
  };
  static constexpr size_t HEAD = sizeof(Node) / sizeof(uint64_t);

  Node &at(uint32_t node) { return *reinterpret_cast<Node *>(&nodes_[node * stride()]); }
  uint64_t *held(uint32_t node) { return &nodes_[node * stride() + HEAD]; }
  uint64_t *reachable(uint32_t node) { return held(node) + words_; }
  size_t stride() const { return HEAD + 2 * words_; }
  static bool has(const uint64_t *mask, size_t slot) { return mask[slot / 64] >> slot % 64 & 1; }
  static void set(uint64_t *mask, size_t slot) { mask[slot / 64] |= uint64_t(1) << slot % 64; }
  static void unset(uint64_t *mask, size_t slot) { mask[slot / 64] &= ~(uint64_t(1) << slot % 64); }
  bool is_held(uint32_t node) {
    for (size_t word = 0; word < words_; word++)
      if (held(node)[word]) return true;
    return false;
  }

  void make_room_for(size_t slot) {
    size_t words = words_;
    while (slot >= words * 64) words *= 2;
    if (words != words_) {
      Words wider(num_nodes_ * (HEAD + 2 * words));
      for (uint32_t node = 0; node < num_nodes_; node++) {
        uint64_t *to = &wider[node * (HEAD + 2 * words)];
        std::memcpy(to, &at(node), sizeof(Node));
        std::memcpy(to + HEAD, held(node), words_ * sizeof *to);
        std::memcpy(to + HEAD + words, reachable(node), words_ * sizeof *to);
      }
      nodes_.swap(wider);
      words_ = words;
    }
    counts_.resize(words * 64);
  }

  uint32_t find(Hash hash) {
    return table_.find(hash, [&](uint32_t node) { return at(node).hash == hash; });
  }

  uint32_t find_or_add(Hash hash) {
    if (uint32_t node = find(hash)) return node;
    uint32_t node = free_;
    if (node) {
      free_ = at(node).next;
    } else {
      node = num_nodes_++;
      nodes_.resize(num_nodes_ * stride());
    }
    at(node) = {hash, 0, 0, 0, 0, 0};
    table_.add(hash, node);
    return node;
  }

  void release(uint32_t node) {
    table_.remove(at(node).hash, node);
    at(node).is_free = 1;
    at(node).next = free_;
    free_ = node;
  }

  void link(uint32_t node, uint32_t parent) {
    Node &own = at(node);
    own.parent = parent, own.previous = 0, own.next = at(parent).child;
    if (own.next) at(own.next).previous = node;
    at(parent).child = node;
  }

  // Nobody holds the block any more.
  void forget(uint32_t node) {
    num_known--;
    Node &own = at(node);
    uint32_t parent = own.parent;
    if (parent) {
      (own.previous ? at(own.previous).next : at(parent).child) = own.next;
      if (own.next) at(own.next).previous = own.previous;
      own.parent = own.next = own.previous = 0;
    }
    if (!own.child) release(node);
    if (parent && parent != node && !at(parent).child && !is_held(parent)) release(parent);
  }

  // A newly held block is reachable if its parent is, and so is what it makes reachable.
  void reach(uint32_t node, size_t slot) {
    uint32_t parent = at(node).parent;
    if (parent && !has(reachable(parent), slot)) return;
    for (stack_ = {node}; !stack_.empty();) {
      node = stack_.back();
      stack_.pop_back();
      set(reachable(node), slot);
      for (uint32_t child = at(node).child; child; child = at(child).next)
        if (has(held(child), slot) && !has(reachable(child), slot)) stack_.push_back(child);
    }
  }

  void unreach(uint32_t node, size_t slot) {
    for (stack_ = {node}; !stack_.empty();) {
      node = stack_.back();
      stack_.pop_back();
      unset(reachable(node), slot);
      for (uint32_t child = at(node).child; child; child = at(child).next)
        if (has(reachable(child), slot)) stack_.push_back(child);
    }
  }

  size_t words_ = 1;  // of a mask
  uint32_t num_nodes_ = 1, free_ = 0;
  Words nodes_ = Words(HEAD + 2);
  Table table_;
  std::vector<int64_t> counts_ = std::vector<int64_t>(64);
  std::vector<uint32_t> stack_;
};

// Blocks that placed prompts will leave, each for a time. A block's entries are a list.
class Predictions {
 public:
  void predict(const int64_t *slots, size_t num_slots, const uint8_t *hashes, size_t count,
               double now_s, double expires_s, size_t max_entries) {
    purge(now_s);
    size_t room = max_entries > expiries_.size() ? max_entries - expiries_.size() : 0;
    count = num_slots ? std::min(count, room / num_slots) : 0;
    for (size_t index = 0; index < count; index++) {
      uint32_t block = find_or_add(Hash(hashes + index * HASH_BYTES));
      for (size_t which = 0; which < num_slots; which++) {
        uint32_t entry = entry_of(block, slots[which]);
        if (entry && entries_[entry].expires_s >= expires_s) continue;
        if (!entry) entry = add_entry(block, slots[which]);
        entries_[entry].expires_s = expires_s;
        blocks_[block].num_expiries++;
        expiries_.push_back({expires_s, block, uint32_t(slots[which])});
      }
      if (!blocks_[block].num_expiries) release(block);
    }
  }

  void forget(size_t slot) {
    for (uint32_t block = 1; block < blocks_.size(); block++) remove_entry(block, slot);
  }

  bool empty() const { return expiries_.empty(); }

  void lookup(const uint8_t *hashes, size_t count, int64_t *found, size_t num_slots, double now_s) {
    leading_blocks(hashes, count, num_slots, found, [&](Hash hash, uint64_t *mask) {
      uint32_t block = find(hash);
      for (uint32_t entry = blocks_[block].entry; entry; entry = entries_[entry].next)
        if (entries_[entry].expires_s > now_s && entries_[entry].slot < num_slots)
          mask[entries_[entry].slot / 64] |= uint64_t(1) << entries_[entry].slot % 64;
      return block != 0;
    });
  }

 private:
  struct Block {
    Hash hash = Hash(0, 0);
    uint32_t entry = 0, num_expiries = 0;  // entry: the first
  };
  struct Entry {
    double expires_s;
    uint32_t slot, next;
  };
  struct Expiry {
    double expires_s;
    uint32_t block, slot;
  };

  uint32_t find(Hash hash) {
    return table_.find(hash, [&](uint32_t block) { return blocks_[block].hash == hash; });
  }

  uint32_t find_or_add(Hash hash) {
    if (uint32_t block = find(hash)) return block;
    uint32_t block = taken(free_blocks_, blocks_);
    blocks_[block] = Block{hash};
    table_.add(hash, block);
    return block;
  }

  void release(uint32_t block) {
    table_.remove(blocks_[block].hash, block);
    blocks_[block] = Block{};
    free_blocks_.push_back(block);
  }

  uint32_t entry_of(uint32_t block, size_t slot) {
    uint32_t entry = blocks_[block].entry;
    while (entry && entries_[entry].slot != slot) entry = entries_[entry].next;
    return entry;
  }

  uint32_t add_entry(uint32_t block, size_t slot) {
    uint32_t entry = taken(free_entries_, entries_);
    entries_[entry] = {0.0, uint32_t(slot), blocks_[block].entry};
    blocks_[block].entry = entry;
    return entry;
  }

  void remove_entry(uint32_t block, size_t slot) {
    for (uint32_t *link = &blocks_[block].entry; *link; link = &entries_[*link].next) {
      if (entries_[*link].slot != slot) continue;
      free_entries_.push_back(*link);
      *link = entries_[*link].next;
      return;
    }
  }

  void purge(double now_s) {
    for (; !expiries_.empty() && expiries_.front().expires_s <= now_s; expiries_.pop_front()) {
      Expiry first = expiries_.front();
      uint32_t entry = entry_of(first.block, first.slot);
      if (entry && entries_[entry].expires_s <= now_s) remove_entry(first.block, first.slot);
      if (!--blocks_[first.block].num_expiries) release(first.block);
    }
  }

  template <class Item>
  static uint32_t taken(std::vector<uint32_t> &free, std::vector<Item> &items) {
    if (free.empty()) {
      items.resize(items.size() + 1);
      return items.size() - 1;
    }
    uint32_t number = free.back();
    free.pop_back();
    return number;
  }

  std::vector<Block> blocks_ = std::vector<Block>(1);
  std::vector<Entry> entries_ = std::vector<Entry>(1);
  std::vector<uint32_t> free_blocks_, free_entries_;
  std::deque<Expiry> expiries_;
  Table table_;
};

struct Index {
  Blocks blocks;
  Predictions predictions;
};

}  // namespace

extern "C" {

Index *baton_index_new() { return new Index; }
void baton_index_delete(Index *index) { delete index; }
uint64_t baton_index_size(Index *index) { return index->blocks.num_known; }
int64_t baton_index_held(Index *index, uint64_t slot) { return index->blocks.num_held(slot); }
void baton_index_clear(Index *index, uint64_t slot) { index->blocks.clear(slot); }
void baton_index_forget(Index *index, uint64_t slot) { index->predictions.forget(slot); }
const char *baton_index_fault(Index *index) { return index->blocks.fault(); }

void baton_index_store(Index *index, uint64_t slot, uint64_t num_chains, const uint8_t *parents,
                       const uint64_t *lengths, const uint8_t *hashes) {
  static const uint8_t NONE[HASH_BYTES] = {};
  for (uint64_t chain = 0; chain < num_chains; chain++, parents += HASH_BYTES) {
    bool is_root = !std::memcmp(parents, NONE, HASH_BYTES);
    index->blocks.store(slot, is_root ? nullptr : parents, hashes, lengths[chain]);
    hashes += lengths[chain] * HASH_BYTES;
  }
}

void baton_index_remove(Index *index, uint64_t slot, const uint8_t *hashes, uint64_t count) {
  index->blocks.remove(slot, hashes, count);
}

void baton_index_predict(Index *index, const int64_t *slots, uint64_t num_slots,
                         const uint8_t *hashes, uint64_t count, double now_s, double expires_s,
                         uint64_t max_entries) {
  index->predictions.predict(slots, num_slots, hashes, count, now_s, expires_s, max_entries);
}

// `found` is zeros.
void baton_index_lookup(Index *index, const uint8_t *hashes, uint64_t count, int64_t *found,
                        uint64_t num_slots, double now_s) {
  index->blocks.lookup(hashes, count, found, num_slots);
  if (!index->predictions.empty())
    index->predictions.lookup(hashes, count, found, num_slots, now_s);
}
}
