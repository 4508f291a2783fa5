// Causal attention over paged KV, prefill and decode alike: a tile of query rows (tokens x the
// query heads of one key-value head) meets tiles of keys with an online softmax
// (arXiv:2205.14135). Work is shared over (sequence, key-value head, query tile, part of the keys).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "products.h"

namespace baton {

// The pool's layout for one layer on one rank; strides in bytes.
struct Pool {
  const char* keys;
  const char* values;
  int64_t region_stride;
  int64_t block_stride;
  int64_t blocks_per_region;
  int64_t kv_heads;
  int64_t block_size;
  int64_t head_dim;
};

struct Batch {
  const int64_t* query_starts;  // [num_seqs + 1]
  const int64_t* context_lens;  // [num_seqs]
  const int32_t* tables;
  const int64_t* table_starts;  // [num_seqs + 1]
  int64_t num_seqs;
  int64_t num_heads;
  int64_t window;  // 0: none
  float scale;
};

constexpr int kKeys = 128;    // keys in a tile
constexpr int kMaxRows = 256;  // query rows in a tile
constexpr int kRowStep = 6;   // query rows whose sums are in registers at once
constexpr int kRowsTogether = 96;  // query rows that meet a tile while their scores are in the cache
constexpr bool kManyRegisters = kRegisters == 32;
constexpr float kLowest = -1e30f;  // a softmax maximum before any key was seen
constexpr int64_t kLeastKeys = 256;  // of a part, where keys are split over threads
static_assert(kRowsTogether % 32 == 0 && kMaxRows % 32 == 0, "AMX works on 32 whole rows");

struct Item {
  int64_t seq, kv_head;
  int64_t first_query, num_queries;  // tokens
  int64_t first_key, last_key;       // positions
  int64_t partial;                   // index among the parts of one query tile's keys, or -1

  int64_t first_tile() const { return first_key / kKeys * kKeys; }
};

// What one thread works in. Buffers begin at whole cache lines: AMX is five times slower on others.
template <typename T>
struct Scratch {
  int64_t words;  // of a head
  std::unique_ptr<char[]> memory;
  uint32_t *queries, *keys, *values, *weights;
  float *scores, *sums, *totals;  // totals: of each lane by itself
  T* zeros;
  float most[kMaxRows], total[kMaxRows];

  explicit Scratch(int64_t dim) : words(dim / kPerWord<T>) {
    char* free = nullptr;
    for (int pass = 0; pass < 2; pass++) {  // the first finds the size
      auto take = [&](auto*& buffer, int64_t count) {
        buffer = reinterpret_cast<std::remove_reference_t<decltype(buffer)>>(free);
        free += round_up(count * static_cast<int64_t>(sizeof(*buffer)), 64);
      };
      take(queries, kMaxRows * words);
      take(keys, words * kKeys);
      take(values, kKeys / kPerWord<T> * dim);
      take(weights, kRowsTogether * kKeys / kPerWord<T>);
      take(scores, kRowsTogether * kKeys);
      take(sums, kMaxRows * dim);
      take(totals, kMaxRows * kLanes);
      take(zeros, dim);
      if (pass > 0) break;
      memory.reset(new char[reinterpret_cast<intptr_t>(free) + 64]);
      free = reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(memory.get()), 64));
    }
    std::fill_n(reinterpret_cast<char*>(zeros), dim * sizeof(T), 0);
  }
};

// The calling thread's, kept from call to call.
template <typename T>
Scratch<T>& scratch_of(int64_t dim) {
  static thread_local std::unique_ptr<Scratch<T>> kept;
  if (kept == nullptr || kept->words != dim / kPerWord<T>) kept = std::make_unique<Scratch<T>>(dim);
  return *kept;
}

// Where a row's outputs go: [rows, width], or the tiles that a product reads.
template <typename T>
struct Rows16 {
  T* data;
  int64_t width;
  bool is_tiled;

  T* at(int64_t row, int64_t k) const {  // and 15 from there on
    return data + (is_tiled ? tiled(row, k, width) : row * width + k);
  }
};

// Where the keys and values of a tile are. Outside of the item they are zeros.
template <typename T>
struct TileRows {
  const T *keys[kKeys], *values[kKeys];

  void find(const Pool& pool, const int32_t* table, const Item& item, int64_t tile, const T* zeros) {
    for (int64_t i = 0; i < kKeys;) {
      const int64_t position = tile + i;
      if (position < item.first_key || position >= item.last_key) {
        keys[i] = values[i] = zeros;
        i++;
        continue;
      }
      const int64_t block = table[position / pool.block_size], at = position % pool.block_size;
      const int64_t start = block / pool.blocks_per_region * pool.region_stride +
                            block % pool.blocks_per_region * pool.block_stride;
      const int64_t row = (item.kv_head * pool.block_size + at) * pool.head_dim;
      const T* key = reinterpret_cast<const T*>(pool.keys + start) + row;
      const T* value = reinterpret_cast<const T*>(pool.values + start) + row;
      const int64_t left = std::min(pool.block_size - at, item.last_key - position);
      for (const int64_t end = std::min<int64_t>(i + left, kKeys); i < end; i++) {
        keys[i] = key, values[i] = value;
        key += pool.head_dim, value += pool.head_dim;
      }
    }
  }
};

// The first `count` keys of a tile as [word][key], so that one key is one lane; those outside of the
// item are zeros.
template <typename T>
void pack_keys(const T* const* rows, int64_t count, Scratch<T>& s) {
  for (int64_t word = 0; word < s.words; word += kLanes) {
    for (int64_t key = 0; key < count; key += kLanes) {
      U16 tile[kLanes];
      for (int i = 0; i < kLanes; i++) {
        tile[i] = load_raw<U16>(reinterpret_cast<const uint32_t*>(rows[key + i]) + word);
      }
      transpose(tile);
      for (int i = 0; i < kLanes; i++) store_raw(&s.keys[(word + i) * kKeys + key], tile[i]);
    }
  }
}

// The first `count` values of a tile as [key word][dim]: a Bf16 word holds two neighbouring keys.
template <typename T>
void pack_values(const T* const* rows, int64_t count, int64_t dim, Scratch<T>& s) {
  for (int64_t key = 0; key < count; key += kPerWord<T>) {
    uint32_t* to = &s.values[key / kPerWord<T> * dim];
    if constexpr (sizeof(T) == 4) {
      std::memcpy(to, rows[key], dim * 4);
    } else {
      for (int64_t i = 0; i < dim; i += kLanes) {
        U16 low = widened(load_raw<H16>(rows[key] + i));
        U16 high = widened(load_raw<H16>(rows[key + 1] + i));
        store_raw(to + i, low | (high << 16));
      }
    }
  }
}

template <typename Do>
void with_rows(int64_t rows, Do run) {
  switch (rows) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    default: return run(std::integral_constant<int, kRowStep>());
  }
}

// to[row][column] (+)= left[row][word] . right[word][column], for kRows rows, kVecs * 16 columns.
template <typename T, int kRows, int kVecs, bool kAdd>
void multiply(const uint32_t* left, int64_t left_stride, const uint32_t* right,
              int64_t right_stride, int64_t words, float* to, int64_t to_stride) {
  F16 sums[kRows][kVecs];
  for (int r = 0; r < kRows; r++) {
    for (int c = 0; c < kVecs; c++) {
      sums[r][c] = kAdd ? load(to + r * to_stride + c * kLanes) : F16{};
    }
  }
  for (int64_t word = 0; word < words; word++) {
    U16 columns[kVecs];
    for (int c = 0; c < kVecs; c++) {
      columns[c] = load_raw<U16>(right + word * right_stride + c * kLanes);
    }
    for (int r = 0; r < kRows; r++) {
      U16 value = splat_raw(left[r * left_stride + word]);
      for (int c = 0; c < kVecs; c++) sums[r][c] = dot<T>(sums[r][c], value, columns[c]);
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int c = 0; c < kVecs; c++) store(to + r * to_stride + c * kLanes, sums[r][c]);
  }
}

// The same for any rows and a multiple of 32 columns.
template <typename T, bool kAdd>
void multiply_all(int64_t rows, int64_t columns, const uint32_t* left, int64_t left_stride,
                  const uint32_t* right, int64_t right_stride, int64_t words, float* to,
                  int64_t to_stride, const AmxTiles& amx) {
#if defined(BATON_AMX)
  if (sizeof(T) == 2 && amx.on && rows > kRowStep) {  // buffers have room for whole row tiles
    for (int64_t column = 0; column < columns; column += 2 * kStrip) {
      for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
        auto multiply = rows - r > kTileRows ? amx_multiply<2, 0> : amx_multiply<1, 0>;
        for (int64_t c = column; c < std::min(column + 2 * kStrip, columns); c += kStrip) {
          multiply(reinterpret_cast<const char*>(left + r * left_stride), left_stride * 64,
                   left_stride * 4, 64, reinterpret_cast<const char*>(right + c), 64,
                   right_stride * 4, right_stride * 64, words / kLanes, to + r * to_stride + c,
                   to_stride * 4, kAdd, nullptr);
        }
      }
    }
    return;
  }
#endif
  auto all_rows = [&](auto vecs, int64_t c) {
    for (int64_t r = 0; r < rows; r += kRowStep) {
      with_rows(std::min<int64_t>(rows - r, kRowStep), [&](auto count) {
        multiply<T, count(), vecs(), kAdd>(left + r * left_stride, left_stride, right + c,
                                           right_stride, words, to + r * to_stride + c, to_stride);
      });
    }
  };
  constexpr int kVecs = kManyRegisters ? 4 : 1;
  int64_t c = 0;
  for (; c + kVecs * kLanes <= columns; c += kVecs * kLanes) {
    all_rows(std::integral_constant<int, kVecs>(), c);
  }
  if (c < columns) all_rows(std::integral_constant<int, 2>(), c);
}

// A decode's few rows meet each key where it lies: a tile in another order is not worth its making.
// Meanwhile the next tile comes into the second cache, line by line.
inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// How many keys or vectors of values meet `rows` at once, so that their sums stay in registers. At
// least `least`: those of Bf16 values come in pairs, and some sums of many rows then leave them.
constexpr int at_once(int rows, int least) {
  const int most = kManyRegisters ? (rows > 3 ? 2 : 4) : rows > 3 ? 1 : rows > 1 ? 2 : 4;
  return std::max(most, least);
}

template <typename T>
void fetch_rows(const T* const* rows, int64_t first, int64_t last, int64_t dim) {
  for (int64_t row = first; row < last; row++) {
    for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) fetch(rows[row] + i);
  }
}

// scores[row][key] of a tile, at least for keys `first` to `last` - 1.
template <typename T, int kRows>
void few_scores(const TileRows<T>& tile, const TileRows<T>& next, int64_t first, int64_t last,
                Scratch<T>& s) {
  constexpr int kTogether = at_once(kRows, 1);  // keys whose sums are in registers
  for (int64_t key = 0; key < kKeys; key += kLanes) {
    if (key + kLanes <= first || key >= last) {
      fetch_rows(next.keys, key, key + kLanes, s.words * kPerWord<T>);
      continue;
    }
    F16 parts[kRows][kLanes];
    for (int i = 0; i < kLanes; i += kTogether) {
      F16 sums[kRows][kTogether] = {};
      for (int64_t word = 0; word < s.words; word += kLanes) {
        U16 words[kTogether];
        for (int k = 0; k < kTogether; k++) {
          words[k] = load_raw<U16>(tile.keys[key + i + k] + word * kPerWord<T>);
          fetch(next.keys[key + i + k] + word * kPerWord<T>);
        }
        for (int r = 0; r < kRows; r++) {
          const U16 query = load_raw<U16>(s.queries + r * s.words + word);
          for (int k = 0; k < kTogether; k++) sums[r][k] = dot<T>(sums[r][k], query, words[k]);
        }
      }
      for (int r = 0; r < kRows; r++) {
        for (int k = 0; k < kTogether; k++) parts[r][i + k] = sums[r][k];
      }
    }
    for (int r = 0; r < kRows; r++) store(s.scores + r * kKeys + key, lane_sums(parts[r]));
  }
}

// sums[row][dim] += weights[row][key] * values[key][dim] for keys `first` to `last` - 1 of a tile, and
// 16 * kColumns dims from `from` on.
template <typename T, int kRows, int kColumns>
void few_values(const TileRows<T>& tile, const TileRows<T>& next, int64_t first, int64_t last,
                int64_t from, int64_t dim, Scratch<T>& s) {
  constexpr int kPer = kPerWord<T>;
  F16 sums[kRows][kColumns] = {};  // of Bf16: even dims, then odd ones of each 32
  for (int64_t word = first / kPer; word * kPer < last; word++) {
    for (int half = 0; half < kPer; half++) {
      const T* row = tile.values[word * kPer + half] + from;
      F16 values[kColumns];
      for (int c = 0; c < kColumns; c += kPer) {
        const U16 words = load_raw<U16>(row + c * kLanes);
        for (int i = 0; i < kPer; i++) values[c + i] = part<T>(words, i);
        fetch(next.values[word * kPer + half] + from + c * kLanes);
      }
      for (int r = 0; r < kRows; r++) {
        const F16 weight = part<T>(splat_raw(s.weights[r * kKeys / kPer + word]), half);
        for (int c = 0; c < kColumns; c++) sums[r][c] += values[c] * weight;
      }
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int c = 0; c < kColumns; c += kPer) {
      float* to = s.sums + r * dim + from + c * kLanes;
      if constexpr (kPer == 2) interleave(sums[r][c], sums[r][c + 1]);
      for (int i = 0; i < kPer; i++) store(to + i * kLanes, load(to + i * kLanes) + sums[r][c + i]);
    }
  }
}

template <typename T, int kRows>
void add_few_values(const TileRows<T>& tile, const TileRows<T>& next, int64_t first, int64_t last,
                    int64_t dim, Scratch<T>& s) {
  fetch_rows(next.values, 0, first, dim);
  fetch_rows(next.values, last, kKeys, dim);
  constexpr int kColumns = at_once(kRows, kPerWord<T>);
  int64_t from = 0;
  for (; from + kColumns * kLanes <= dim; from += kColumns * kLanes) {
    few_values<T, kRows, kColumns>(tile, next, first, last, from, dim, s);
  }
  if (from < dim) few_values<T, kRows, 2>(tile, next, first, last, from, dim, s);
}

// Turn row r's scores of a tile into weights, and rescale what the row has summed so far if one of
// them exceeds its maximum. `scale` is for exponents of 2.
template <typename T, bool kAllVisible>
void softmax_row(int64_t r, const float* scores, T* weights, int64_t visible_from, int64_t visible_to,
                 float scale, int64_t dim, Scratch<T>& s) {
  static constexpr float kLane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  auto visible = [&](int c, F16 value, float otherwise) {
    if constexpr (kAllVisible) return value;
    const F16 key = load(kLane) + static_cast<float>(c * kLanes);
    const I16 seen = (splat(visible_from - 1.0f) < key) & (key < splat(visible_to));
    return select(seen, value, splat(otherwise));
  };
  F16 scaled[kKeys / kLanes];
  F16 most = splat(kLowest);
  for (int c = 0; c < kKeys / kLanes; c++) {
    scaled[c] = visible(c, load(scores + c * kLanes) * scale, -INFINITY);
    most = max(most, scaled[c]);
  }
  float* totals = s.totals + r * kLanes;
  F16 total = load(totals);
  if (any_above(most, s.most[r])) {
    const float new_most = max_lane(most), shrink = std::exp2(s.most[r] - new_most);
    total *= shrink;
    float* sums = &s.sums[r * dim];
    for (int64_t i = 0; i < dim; i += kLanes) store(sums + i, load(sums + i) * shrink);
    s.most[r] = new_most;
  }
  const F16 from = splat(s.most[r]);
  for (int c = 0; c < kKeys / kLanes; c++) {
    const F16 weight = visible(c, exp2<T>(scaled[c] - from), 0.0f);
    total += rounded<T>(weight);  // as the values are weighted
    store(weights + c * kLanes, weight);
  }
  store(totals, total);
}

// All of an item's keys against its queries: leaves sums, totals and maxima in the scratch.
// `following`: the item that this thread is likely to take next, or this one.
template <typename T>
void run_item(const Item& item, const Item& following, const T* queries, const Pool& pool,
              const Batch& batch, const AmxTiles& amx, Scratch<T>& s) {
  const int64_t dim = pool.head_dim, group = batch.num_heads / pool.kv_heads;
  const int64_t rows = item.num_queries * group, context = batch.context_lens[item.seq];
  const int64_t query_start = batch.query_starts[item.seq];
  auto find = [&](TileRows<T>& rows, const Item& of, int64_t tile) {
    rows.find(pool, batch.tables + batch.table_starts[of.seq], of, tile, s.zeros);
  };
  for (int64_t r = 0; r < rows; r++) {
    int64_t token = query_start + item.first_query + r / group;
    int64_t head = item.kv_head * group + r % group;
    std::memcpy(&s.queries[r * s.words], queries + (token * batch.num_heads + head) * dim,
                dim * sizeof(T));
  }
  std::fill_n(s.sums, rows * dim, 0.0f);
  std::fill_n(s.totals, rows * kLanes, 0.0f);
  std::fill_n(s.most, rows, kLowest);
  TileRows<T> tiles[2];
  const int64_t first_tile = item.first_tile();
  find(tiles[0], item, first_tile);
  for (int64_t tile = first_tile; tile < item.last_key; tile += kKeys) {
    const TileRows<T>& at = tiles[(tile - first_tile) / kKeys % 2];
    TileRows<T>& next = tiles[(tile - first_tile) / kKeys % 2 ^ 1];
    if (tile + kKeys < item.last_key) find(next, item, tile + kKeys);
    else find(next, following, following.first_tile());
    const int64_t first = std::max<int64_t>(item.first_key - tile, 0);
    const int64_t last = std::min<int64_t>(item.last_key - tile, kKeys);
    // The keys of the tile that row r sees.
    auto visible = [&](int64_t r) {
      const int64_t position = context + item.first_query + r / group;
      const int64_t from = batch.window ? position + 1 - batch.window : 0;
      return std::make_pair(std::clamp<int64_t>(std::max(item.first_key, from) - tile, 0, kKeys),
                            std::clamp<int64_t>(std::min(item.last_key, position + 1) - tile, 0, kKeys));
    };
    auto softmax = [&](int64_t first_row, int64_t count) {
      for (int64_t i = 0; i < count; i++) {
        const auto [from, to] = visible(first_row + i);
        const auto run = from == 0 && to == kKeys ? softmax_row<T, true> : softmax_row<T, false>;
        run(first_row + i, s.scores + i * kKeys, reinterpret_cast<T*>(s.weights) + i * kKeys, from, to,
            batch.scale * kLog2E, dim, s);
      }
    };
    if (rows <= kRowStep) {
      with_rows(rows, [&](auto count) { few_scores<T, count()>(at, next, first, last, s); });
      softmax(0, rows);
      with_rows(rows, [&](auto count) { add_few_values<T, count()>(at, next, first, last, dim, s); });
      continue;
    }
    pack_keys(at.keys, round_up(last, kStrip), s);
    pack_values(at.values, round_up(last, kStrip), dim, s);
    for (int64_t r = 0; r < rows; r += kRowsTogether) {
      const int64_t count = std::min<int64_t>(kRowsTogether, rows - r);
      const int64_t keys = round_up(visible(r + count - 1).second, kStrip);  // that any row sees
      if (visible(r).first == kKeys || keys == 0) continue;
      multiply_all<T, false>(count, keys, s.queries + r * s.words, s.words, s.keys, kKeys, s.words,
                             s.scores, kKeys, amx);
      softmax(r, count);
      multiply_all<T, true>(count, dim, s.weights, kKeys / kPerWord<T>, s.values, dim,
                            keys / kPerWord<T>, s.sums + r * dim, dim, amx);
    }
  }
  for (int64_t r = 0; r < rows; r++) s.total[r] = sum(load(s.totals + r * kLanes));
}

template <typename T>
void write_rows(const Item& item, const Batch& batch, int64_t kv_heads, int64_t dim,
                const Scratch<T>& s, const Rows16<T>& out) {
  const int64_t group = batch.num_heads / kv_heads, rows = item.num_queries * group;
  for (int64_t r = 0; r < rows; r++) {
    int64_t token = batch.query_starts[item.seq] + item.first_query + r / group;
    int64_t k = (item.kv_head * group + r % group) * dim;
    float inverse = 1.0f / s.total[r];
    for (int64_t i = 0; i < dim; i += kLanes) {
      store(out.at(token, k + i), load(&s.sums[r * dim + i]) * inverse);
    }
  }
}

// Query tiles, those with the most keys first. A decode step with fewer tiles than threads has its
// keys split, so that long contexts use all of them.
inline std::vector<Item> plan_items(const Pool& pool, const Batch& batch, int threads) {
  const int64_t group = batch.num_heads / pool.kv_heads;
  const int64_t queries_per_tile = std::max<int64_t>(1, kMaxRows / group);
  std::vector<Item> items;
  for (int64_t seq = 0; seq < batch.num_seqs; seq++) {
    int64_t count = batch.query_starts[seq + 1] - batch.query_starts[seq];
    int64_t context = batch.context_lens[seq];
    for (int64_t first = 0; first < count; first += queries_per_tile) {
      int64_t queries = std::min(queries_per_tile, count - first);
      int64_t begin = batch.window ? std::max<int64_t>(0, context + first + 1 - batch.window) : 0;
      for (int64_t head = 0; head < pool.kv_heads; head++) {
        items.push_back({seq, head, first, queries, begin, context + first + queries, -1});
      }
    }
  }
  auto keys = [](const Item& item) { return item.last_key - item.first_key; };
  std::stable_sort(items.begin(), items.end(),
                   [&](const Item& a, const Item& b) { return keys(a) > keys(b); });
  if (items.empty() || static_cast<int>(items.size()) >= threads) return items;
  const int64_t parts = 2 * threads / static_cast<int64_t>(items.size());
  std::vector<Item> split;
  for (const Item& whole : items) {
    int64_t step = std::max(kLeastKeys, (keys(whole) / parts + kKeys) / kKeys * kKeys);
    int64_t index = 0;
    for (int64_t from = whole.first_key; from < whole.last_key; index++) {
      int64_t to = std::min(whole.last_key, (from / kKeys) * kKeys + step);
      Item part = whole;
      part.first_key = from;
      part.last_key = to;
      part.partial = index;
      split.push_back(part);
      from = to;
    }
  }
  return split;
}

// What an item that is only a part of the keys leaves for the merge.
struct Part {
  std::vector<float> most, total, sums;
};

// Merge the parts of one query tile, items[first] to items[last - 1].
template <typename T>
void merge_parts(const std::vector<Item>& items, const std::vector<Part>& parts, size_t first,
                 const Pool& pool, const Batch& batch, Scratch<T>& s, const Rows16<T>& out) {
  const int64_t dim = pool.head_dim, rows = static_cast<int64_t>(parts[first].most.size());
  size_t last = first + 1;
  while (last < items.size() && items[last].partial > 0) last++;
  for (int64_t r = 0; r < rows; r++) {
    float most = kLowest;
    for (size_t i = first; i < last; i++) most = std::max(most, parts[i].most[r]);
    s.total[r] = 0;
    std::fill_n(&s.sums[r * dim], dim, 0.0f);
    for (size_t i = first; i < last; i++) {
      float weight = std::exp2(parts[i].most[r] - most);
      s.total[r] += weight * parts[i].total[r];
      for (int64_t d = 0; d < dim; d++) s.sums[r * dim + d] += weight * parts[i].sums[r * dim + d];
    }
  }
  write_rows(items[first], batch, pool.kv_heads, dim, s, out);
}

// Work of one step's attention in layers of equal window and block tables.
struct AttentionPlan {
  std::vector<Item> items;
  std::vector<Part> parts;  // empty, or one for each item

  AttentionPlan(const Pool& pool, const Batch& batch, int threads)
      : items(plan_items(pool, batch, threads)),
        parts(items.empty() || items[0].partial < 0 ? 0 : items.size()) {}
};

// Team.
template <typename T>
void team_attend(const T* queries, const Rows16<T>& out, const Pool& pool, const Batch& batch,
                 AttentionPlan& plan, const AmxTiles& amx, Scratch<T>& s, Member& member) {
  const std::vector<Item>& items = plan.items;
  const int64_t dim = pool.head_dim, count = items.size();
  member.each(count, [&](int64_t i) {
    run_item(items[i], items[std::min(i + 1, count - 1)], queries, pool, batch, amx, s);
    if (plan.parts.empty()) return write_rows(items[i], batch, pool.kv_heads, dim, s, out);
    int64_t rows = items[i].num_queries * (batch.num_heads / pool.kv_heads);
    plan.parts[i].most.assign(s.most, s.most + rows);
    plan.parts[i].total.assign(s.total, s.total + rows);
    plan.parts[i].sums.assign(s.sums, s.sums + rows * dim);
  });
  if (plan.parts.empty()) return;
  member.each(count, [&](int64_t i) {
    if (items[i].partial == 0) merge_parts(items, plan.parts, i, pool, batch, s, out);
  });
}

}  // namespace baton
