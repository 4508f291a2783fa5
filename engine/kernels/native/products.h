// Products of activations with packed weights, x @ weight.T. Three kernels, chosen when compiled and
// by what the system allows: AMX tiles, AVX-512's bf16 dot product, and multiply-add in float with
// bf16 weights widened in registers.
//
// Weights: strips of 32 outputs, each [k tile][2 panels][word][16 outputs], or, where registers hold
// sums of one panel only, [2 panels][k tile][word][16 outputs]. A k tile is 32 inputs. A word is one
// float, or two neighbouring Bf16 or Int8. So each kernel reads one stream of memory, or two for one
// row.
//
// Int8 weights have a scale for each output and group of inputs. Few rows meet them in registers, where
// they become Bf16 or float; a group's sums take its scales. For more rows a strip is widened once, into
// a thread's room that its cache holds, and is multiplied from there as if it had been stored so.
// Activations: tiles of kTileRows rows x 32 inputs, each contiguous, row tiles outermost.
//
// Functions that say "team" are called by all threads of a parallel region, and return when all of it
// is done.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <type_traits>

#include <omp.h>
#include <sched.h>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define BATON_AMX 1
#endif

#include "vec.h"

namespace baton {

constexpr int64_t kStrip = 32;    // outputs
constexpr int64_t kTileK = 32;    // inputs
// Rows and panels whose sums are in registers at once.
constexpr int kMostRows = kRegisters == 32 ? 8 : 6, kPanels = kRegisters == 32 ? 2 : 1;
constexpr int64_t kTileRows = kPanels == 2 ? 16 : kMostRows;
constexpr int64_t kTile = kTileRows * kTileK;  // elements of an activation tile
constexpr int64_t kLongK = 96;  // k tiles that a core's cache holds for a block of rows
constexpr int64_t kChunk = 8;   // strips that a thread takes at a time, at most

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Where element (row, k) of tiled activations of `width` inputs is; 16 from a multiple of 16 on are
// neighbours.
inline int64_t tiled(int64_t row, int64_t k, int64_t width) {
  return (row / kTileRows * (width / kTileK) + k / kTileK) * kTile + row % kTileRows * kTileK +
         k % kTileK;
}

template <typename W>
constexpr int64_t kWordBytes = sizeof(W) * kPerWord<W>;
template <typename W>
constexpr int64_t kStripBytes = kTileK * kStrip * sizeof(W);  // of a k tile
template <typename W>
constexpr int64_t kTileBytes = kStripBytes<W> / (kPanels == 2 ? 1 : 2);  // from a k tile to the next

// From a panel of a strip to the other.
template <typename W>
inline int64_t panel_bytes(int64_t k_tiles) {
  return kStripBytes<W> / 2 * (kPanels == 2 ? 1 : k_tiles);
}

enum Kind : int64_t { kFloat, kBf16, kInt8 };  // of a weight's numbers

struct Weight {
  const char* strips;
  const void* bias;  // [outputs] of the activations' type, or null
  int64_t inputs, outputs;  // inputs: a multiple of 32
  int64_t kind;
  const float* scales;  // [strip][inputs / group][32] of Int8
  int64_t group;        // inputs, a multiple of 32

  int64_t num_strips() const { return (outputs + kStrip - 1) / kStrip; }
  int64_t num_groups() const { return inputs / group; }
  const float* scales_of(int64_t strip) const { return scales + strip * num_groups() * kStrip; }
};

// --- threads --------------------------------------------------------------------------------------

// Phases of items shared out to threads. In each phase a thread works through its own part, then
// takes what others have left. So it meets neighbouring memory, and a core that is slow holds nobody
// up. A phase ends when its items are done, not when every thread has come: one that the system has
// taken off its core delays others only if it holds an item, and skips the phases it missed.
struct Team {
  static constexpr int kMost = 256;
  struct alignas(64) Counter {
    std::atomic<uint64_t> value{0};
  };
  Counter next[kMost];  // of each thread's part: phase << 32 | items taken
  Counter done;         // items of all phases
};

// One thread's view of its team. All threads go through the same phases.
class Member {
 public:
  const int threads = std::min(omp_get_num_threads(), Team::kMost);

  explicit Member(Team& team) : team_(team) {}

  // Run all `count` items, on all threads together; returns when all are done.
  template <typename Run>
  void each(int64_t count, Run run) {
    phase_++;
    expected_ += count;
    for (int i = 0; i < threads && index_ < threads; i++) {
      const int64_t owner = (index_ + i) % threads;
      const int64_t first = count * owner / threads, last = count * (owner + 1) / threads;
      for (int64_t at; (at = take(team_.next[owner].value)) < last - first;) {
        run(first + at);
        team_.done.value.fetch_add(1, std::memory_order_acq_rel);
      }
    }
    for (int spins = 0; team_.done.value.load(std::memory_order_acquire) < expected_; spins++) {
      if (spins < kSpins) pause();
      else sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 4000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int64_t take(std::atomic<uint64_t>& next) {
    uint64_t seen = next.load(std::memory_order_acquire), taken;
    do {
      if (seen >> 32 > phase_) return INT64_MAX;
      taken = seen >> 32 == phase_ ? seen & 0xffffffffu : 0;
    } while (!next.compare_exchange_weak(seen, phase_ << 32 | (taken + 1)));
    return static_cast<int64_t>(taken);
  }

  Team& team_;
  const int index_ = omp_get_thread_num();
  uint64_t phase_ = 0, expected_ = 0;
};

// --- AMX ------------------------------------------------------------------------------------------

#if defined(BATON_AMX)
inline bool may_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// All tiles of a thread are 16 rows of 64 bytes, from construction on.
struct AmxTiles {
  bool on;
  explicit AmxTiles(bool wanted) : on(wanted && may_use_amx()) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    if (!on) return;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    asm volatile("" ::: "memory");  // GCC does not know that this reads all of it
    _tile_loadconfig(&config);
  }
  ~AmxTiles() {
    if (on) _tile_release();
  }
};

// to[16 * kRowTiles][32] (+)= left x right over `steps` pairs of tiles; strides in bytes. Fetches
// kFetch lines from `ahead` on in each step.
template <int kRowTiles, int kFetch>
inline void amx_multiply(const char* left, int64_t left_row_tile, int64_t left_stride,
                         int64_t left_step, const char* right, int64_t right_panel,
                         int64_t right_stride, int64_t right_step, int64_t steps, float* to,
                         int64_t to_stride, bool add, const char* ahead) {
  constexpr bool two = kRowTiles == 2;
  char* sums = reinterpret_cast<char*>(to);
  const int64_t half = 16 * to_stride;
  asm volatile("" ::: "memory");
  if (add) {
    _tile_loadd(0, sums, to_stride);
    _tile_loadd(1, sums + 64, to_stride);
    if (two) _tile_loadd(2, sums + half, to_stride);
    if (two) _tile_loadd(3, sums + half + 64, to_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; i++, left += left_step, right += right_step) {
    _tile_loadd(4, left, left_stride);
    _tile_loadd(6, right, right_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + right_panel, right_stride);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, left + left_row_tile, left_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
#pragma GCC unroll 32
    for (int line = 0; line < kFetch; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
  }
  _tile_stored(0, sums, to_stride);
  _tile_stored(1, sums + 64, to_stride);
  if (two) _tile_stored(2, sums + half, to_stride);
  if (two) _tile_stored(3, sums + half + 64, to_stride);
}
#else
struct AmxTiles {
  static constexpr bool on = false;
  explicit AmxTiles(bool) {}
};
#endif

// --- vectors --------------------------------------------------------------------------------------

inline void prefetch(const char* words) {
  constexpr int64_t kAhead = 6144;  // bytes: what memory needs to answer
  __builtin_prefetch(words + kAhead);
}

// to[row][32]: kRows rows of one activation tile row times kColumns panels of a strip, `panel` bytes
// apart. Few rows times Int8, which memory brings fast, would wait for the latency of their sums: words
// take turns at kTurns of them.
template <typename X, typename W, int kRows, int kColumns>
void vector_multiply(const X* x, const char* w, int64_t panel, int64_t k_tiles, float* to) {
  constexpr int64_t kWords = kTileK / kPerWord<W>, kBytes = kLanes * kWordBytes<W>;
  constexpr int kTurns = kRegisters == 32 && sizeof(W) == 1 && kRows <= 2 ? 4 / kRows : 1;
  F16 sums[kRows][kColumns][kTurns] = {};
  for (int64_t tile = 0; tile < k_tiles; tile++, x += kTile, w += kTileBytes<W>) {
#pragma GCC unroll 2
    for (int64_t pair = 0; pair < kWords; pair += 2) {
      U16 columns[kColumns][2];
      for (int c = 0; c < kColumns; c++) {
        const char* at = w + c * panel + pair * kBytes;
        if constexpr (sizeof(X) == 2) load_bf16_words<W>(at, columns[c]);
        else for (int i = 0; i < 2; i++) columns[c][i] = load_words<W>(at + i * kBytes);
        for (int64_t line = 0; line < 2 * kBytes; line += 64) prefetch(at + line);
      }
#pragma GCC unroll 2
      for (int64_t word = pair; word < pair + 2; word++) {
        if constexpr (sizeof(X) == 2) {
          for (int r = 0; r < kRows; r++) {
            const U16 value = splat_raw(load_raw<uint32_t>(x + r * kTileK + word * kPerWord<W>));
            for (int c = 0; c < kColumns; c++) {
              F16& sum = sums[r][c][word % kTurns];
              sum = dot<X>(sum, value, columns[c][word - pair]);
            }
          }
        } else {
          for (int i = 0; i < kPerWord<W>; i++) {
            F16 wide[kColumns];
            for (int c = 0; c < kColumns; c++) wide[c] = part<W>(columns[c][word - pair], i);
            for (int r = 0; r < kRows; r++) {
              const F16 value = splat(x[r * kTileK + word * kPerWord<W> + i]);
              for (int c = 0; c < kColumns; c++) {
                F16& sum = sums[r][c][word % kTurns];
                sum = wide[c] * value + sum;
              }
            }
          }
        }
      }
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int c = 0; c < kColumns; c++) {
      for (int turns = kTurns / 2; turns > 0; turns /= 2) {
        for (int t = 0; t < turns; t++) sums[r][c][t] += sums[r][c][t + turns];
      }
      store(to + r * kStrip + c * kLanes, sums[r][c][0]);
    }
  }
}

template <typename X, typename W>
void vector_rows(int64_t rows, const X* x, const char* w, int64_t panel, int64_t k_tiles, float* to) {
  auto run = [&](auto narrow, auto wide) {
    if (rows == 1 || kPanels == 2) return wide(x, w, panel, k_tiles, to);
    for (int64_t c = 0; c < 2; c++) narrow(x, w + c * panel, panel, k_tiles, to + c * kLanes);
  };
  switch (rows) {
#define BATON_ROWS(n) \
  case n: return run(vector_multiply<X, W, n, 1>, vector_multiply<X, W, n, n == 1 ? 2 : kPanels>);
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
    BATON_ROWS(7) BATON_ROWS(8)
#undef BATON_ROWS
  }
}

// --- products -------------------------------------------------------------------------------------

// What a thread works in: sums of a block of rows for a chunk of strips.
struct ProductScratch {
  alignas(64) float sums[kChunk * 256 * kStrip];
  alignas(64) float group_sums[kMostRows * kStrip];
  char* widened = nullptr;  // a strip

  ProductScratch() = default;
  ProductScratch(const ProductScratch&) = delete;
  ~ProductScratch() { std::free(widened); }

  char* room(int64_t bytes) {
    if (bytes > size_) {
      std::free(widened);
      widened = static_cast<char*>(std::aligned_alloc(64, bytes));
      size_ = bytes;
    }
    return widened;
  }

 private:
  int64_t size_ = 0;
};

// sums[32] (+)= from[32] * scales[32].
template <bool kAdd>
BATON_INLINE void scale_sums(const float* from, const float* scales, float* sums) {
  for (int64_t i = 0; i < kStrip; i += kLanes) {
    F16 value = load(from + i) * load(scales + i);
    if constexpr (kAdd) value += load(sums + i);
    store(sums + i, value);
  }
}

// A strip of Int8 as if it had been stored as W, with its scales if kScaled.
template <typename W, bool kScaled>
void widen_strip(const Weight& weight, int64_t strip, char* to) {
  constexpr int64_t kWords = kTileK / 2, kBytes = kLanes * kWordBytes<Int8>;
  const int64_t k_tiles = weight.inputs / kTileK, group_tiles = weight.group / kTileK;
  const char* from = weight.strips + strip * k_tiles * kStripBytes<Int8>;
  for (int64_t tile = 0; tile < k_tiles; tile++) {
    for (int64_t panel = 0; panel < 2; panel++) {
      const float* of_group = weight.scales_of(strip) + tile / group_tiles * kStrip;
      const F16 scale = kScaled ? load(of_group + panel * kLanes) : splat(1.0f);
      const char* at = from + tile * kTileBytes<Int8> + panel * panel_bytes<Int8>(k_tiles);
      char* out = to + tile * kTileBytes<W> + panel * panel_bytes<W>(k_tiles);
      if constexpr (!kScaled && sizeof(W) == 2) {
        for (int64_t pair = 0; pair < kWords; pair += 2, at += 2 * kBytes, out += 128) {
          U16 words[2];
          prefetch(at);
          load_bf16_words<Int8>(at, words);
          for (int i = 0; i < 2; i++) store_raw(out + i * 64, words[i]);
        }
        continue;
      }
      for (int64_t word = 0; word < kWords; word++, at += kBytes, out += 2 * kLanes * sizeof(W)) {
        if (word * kBytes % 64 == 0) prefetch(at);
        const U16 words = load_words<Int8>(at);
        const F16 low = part<Int8>(words, 0) * scale, high = part<Int8>(words, 1) * scale;
        if constexpr (sizeof(W) == 4) {
          store_raw(out, low);
          store_raw(out + kLanes * sizeof(W), high);
        } else {
          store_raw(out, widened(to_bf16(low)) | widened(to_bf16(high)) << 16);
        }
      }
    }
  }
}

// Do `multiply(W{}, a strip of W)` with a strip of Int8, then `done(row, sums)` with scaled sums. A
// group's scales go into the wide numbers, which rounds Bf16 as if the checkpoint had them; scales of
// whole outputs go into the sums.
template <typename X, typename Multiply, typename Done>
void with_wide_strip(const Weight& weight, int64_t strip, ProductScratch& s, Multiply multiply,
                     Done done) {
  if (weight.group < weight.inputs) {
    char* to = s.room(weight.inputs * kStrip * sizeof(X));
    widen_strip<X, true>(weight, strip, to);
    return multiply(X{}, to, done);
  }
  char* to = s.room(weight.inputs * kStrip * sizeof(Bf16));
  widen_strip<Bf16, false>(weight, strip, to);
  multiply(Bf16{}, to, [&](int64_t row, float* sums) {
    scale_sums<false>(sums, weight.scales_of(strip), sums);
    done(row, sums);
  });
}

#if defined(BATON_AMX)
// Rows of a block times strips of Bf16, `strips` being the first; `done(row, strip, sums of its 32
// outputs)` for each row.
template <typename Done>
void amx_strips(const Bf16* x, int64_t rows, const char* strips, int64_t k_tiles, int64_t first,
                int64_t last, ProductScratch& s, Done done) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const char* left = reinterpret_cast<const char*>(x);
  const int64_t row_tile = k_tiles * kTile * 2, strip_bytes = k_tiles * 2048;
  for (int64_t k = 0; k < k_tiles; k += kLongK) {
    const int64_t steps = std::min(kLongK, k_tiles - k);
    for (int64_t strip = first; strip < last; strip++) {
      const char* right = strips + (strip - first) * strip_bytes + k * 2048;
      const char* ahead = right + (tiles <= 2 ? 8192 : strip_bytes);
      for (int64_t t = 0; t < tiles; t += 2) {
        auto multiply = t + 1 >= tiles ? amx_multiply<1, 32>
                        : tiles > 16   ? amx_multiply<2, 2>
                        : tiles > 2    ? amx_multiply<2, 4>
                                       : amx_multiply<2, 32>;
        float* sums = s.sums;
        if (k_tiles > kLongK) sums += ((strip - first) * tiles + t) * kTileRows * kStrip;
        multiply(left + t * row_tile + k * kTile * 2, row_tile, 64, kTile * 2, right, 1024, 64, 2048,
                 steps, sums, kStrip * 4, k > 0, ahead);
        ahead += steps * 64 * (tiles > 16 ? 2 : 4);
        if (k + steps < k_tiles) continue;
        for (int64_t r = t * kTileRows; r < std::min((t + 2) * kTileRows, rows); r++) {
          done(r, strip, sums + (r - t * kTileRows) * kStrip);
        }
      }
    }
  }
}

// Rows of a block times a chunk of strips; `done` as above.
template <typename W, typename Done>
void amx_block(const Bf16* x, int64_t rows, const Weight& weight, int64_t first, int64_t last,
               ProductScratch& s, Done done) {
  const int64_t k_tiles = weight.inputs / kTileK;
  if constexpr (sizeof(W) == 2) {
    const char* strips = weight.strips + first * k_tiles * kStripBytes<W>;
    return amx_strips(x, rows, strips, k_tiles, first, last, s, done);
  }
  for (int64_t strip = first; strip < last; strip++) {
    auto multiply = [&](auto, const char* wide, auto finish) {
      amx_strips(x, rows, wide, k_tiles, strip, strip + 1, s,
                 [&](int64_t row, int64_t, float* sums) { finish(row, sums); });
    };
    with_wide_strip<Bf16>(weight, strip, s, multiply,
                          [&](int64_t row, const float* sums) { done(row, strip, sums); });
  }
}
#endif

// Rows times a strip of W; `done(row, sums of its 32 outputs)` for each row.
template <typename X, typename W, typename Done>
void vector_strip(const X* x, int64_t rows, const char* w, int64_t k_tiles, ProductScratch& s,
                  Done done) {
  for (int64_t first = 0; first < rows; first += kTileRows) {
    const int64_t inside = std::min(kTileRows, rows - first);
    const int64_t groups = (inside + kMostRows - 1) / kMostRows;
    for (int64_t g = 0, r = 0; g < groups; g++) {
      const int64_t count = (inside - r) / (groups - g);
      vector_rows<X, W>(count, x + first * k_tiles * kTileK + r * kTileK, w, panel_bytes<W>(k_tiles),
                        k_tiles, s.sums);
      for (int64_t i = 0; i < count; i++) done(first + r + i, s.sums + i * kStrip);
      r += count;
    }
  }
}

// Few rows, at most kMostRows, times a strip of Int8.
template <typename X, typename Done>
void vector_int8_strip(const X* x, int64_t rows, const Weight& weight, int64_t strip,
                       ProductScratch& s, Done done) {
  const int64_t k_tiles = weight.inputs / kTileK, group_tiles = weight.group / kTileK;
  const char* w = weight.strips + strip * k_tiles * kStripBytes<Int8>;
  const float* scales = weight.scales_of(strip);
  for (int64_t k = 0; k < k_tiles; k += group_tiles, scales += kStrip) {
    vector_rows<X, Int8>(rows, x + k * kTile, w + k * kTileBytes<Int8>, panel_bytes<Int8>(k_tiles),
                         group_tiles, s.group_sums);
    for (int64_t r = 0; r < rows; r++) {
      const float* from = s.group_sums + r * kStrip;
      float* to = s.sums + r * kStrip;
      k == 0 ? scale_sums<false>(from, scales, to) : scale_sums<true>(from, scales, to);
    }
  }
  for (int64_t r = 0; r < rows; r++) done(r, s.sums + r * kStrip);
}

template <typename X, typename W, typename Done>
void vector_block(const X* x, int64_t rows, const Weight& weight, int64_t first, int64_t last,
                  ProductScratch& s, Done done) {
  const int64_t k_tiles = weight.inputs / kTileK;
  for (int64_t strip = first; strip < last; strip++) {
    auto finish = [&](int64_t row, const float* sums) { done(row, strip, sums); };
    if constexpr (sizeof(W) > 1) {
      const char* w = weight.strips + strip * k_tiles * kStripBytes<W>;
      vector_strip<X, W>(x, rows, w, k_tiles, s, finish);
    } else if (rows <= kMostRows) {
      vector_int8_strip(x, rows, weight, strip, s, finish);
    } else {
      auto multiply = [&](auto kind, const char* wide, auto then) {
        vector_strip<X, decltype(kind)>(x, rows, wide, k_tiles, s, then);
      };
      with_wide_strip<X>(weight, strip, s, multiply, finish);
    }
  }
}

// Team: tiled x [rows, inputs] times a weight; `done(row, first output, sums of 32 outputs)`.
template <typename X, typename W, typename Done>
void team_product_of(const X* x, int64_t rows, const Weight& weight, const AmxTiles& amx,
                     ProductScratch& s, Member& member, Done done) {
  const int64_t strips = weight.num_strips();
  const int64_t most_rows =
      (weight.inputs <= kLongK * kTileK / 2 ? 512 : 128) / kTileRows * kTileRows;
  const int64_t blocks = std::max<int64_t>((rows + most_rows - 1) / most_rows, 1);
  const int64_t together = kPanels == 2 ? 2 * kTileRows : kTileRows;  // AMX takes pairs of tiles
  const int64_t block_rows = round_up((rows + blocks - 1) / blocks, together);
  const int64_t chunk = std::clamp<int64_t>(strips * blocks / (member.threads * 6), 1, kChunk);
  const int64_t chunks = (strips + chunk - 1) / chunk;
  member.each(blocks * chunks, [&](int64_t item) {
    const int64_t first_row = item / chunks * block_rows, first = item % chunks * chunk;
    const int64_t last = std::min(first + chunk, strips), count = std::min(block_rows, rows - first_row);
    const X* from = x + first_row * weight.inputs;
    auto finish = [&](int64_t row, int64_t strip, const float* sums) {
      done(first_row + row, strip * kStrip, sums);
    };
#if defined(BATON_AMX)
    if constexpr (sizeof(X) == 2) {
      constexpr int64_t few = sizeof(W) == 1 ? kMostRows : 2;  // whose sums registers hold as fast
      if (amx.on && rows > few) return amx_block<W>(from, count, weight, first, last, s, finish);
    }
#endif
    vector_block<X, W>(from, count, weight, first, last, s, finish);
  });
}

template <typename X, typename Done>
void team_product(const X* x, int64_t rows, const Weight& weight, const AmxTiles& amx,
                  ProductScratch& s, Member& member, Done done) {
  auto by = [&](auto kind) {
    team_product_of<X, decltype(kind)>(x, rows, weight, amx, s, member, done);
  };
  if (weight.kind == kInt8) return by(Int8{});
  if constexpr (sizeof(X) == 4) {
    if (weight.kind == kFloat) return by(float{});
  }
  by(Bf16{});
}

// --- what becomes of the sums ---------------------------------------------------------------------

template <typename X>
BATON_INLINE F16 with_bias(const Weight& weight, int64_t output, const float* sums) {
  if (weight.bias == nullptr) return load(sums);
  return load(sums) + load(static_cast<const X*>(weight.bias) + output);
}

// Store up to 32 outputs of a row into `to`, added to what is there if kAdd.
template <bool kAdd, typename X, typename Out>
inline void store_row(const Weight& weight, int64_t output, const float* sums, Out* to) {
  for (int64_t i = 0; i < kStrip; i += kLanes) {
    int64_t left = weight.outputs - output - i;
    if (left >= kLanes) {
      F16 value = with_bias<X>(weight, output + i, sums + i);
      if constexpr (kAdd) value += load(to + i);
      store(to + i, value);
      continue;
    }
    Out kept[kLanes];
    X bias[kLanes];
    F16 value = load(sums + i);
    if (weight.bias != nullptr && left > 0) {
      std::memset(bias, 0, sizeof(bias));
      std::memcpy(bias, static_cast<const X*>(weight.bias) + output + i, left * sizeof(X));
      value += load(bias);
    }
    store(kept, value);
    if (left > 0) std::memcpy(to + i, kept, left * sizeof(Out));
  }
}

enum class Gate : int64_t { kNone, kSilu, kGeluTanh };

// SiLU, or GELU by its approximation with tanh: both are x times a sigmoid.
template <typename X>
BATON_INLINE F16 activated(Gate gate, F16 x) {
  constexpr float kTwiceSqrt2ByPi = 1.5957691216057308f;
  F16 z = x;
  if (gate == Gate::kGeluTanh) z = x * kTwiceSqrt2ByPi * (x * x * 0.044715f + 1.0f);
  const F16 power = max(z * kLog2E, splat(-126.0f));
  return x * reciprocal<X>(exp2<X>(0.0f - power) + 1.0f);
}

// A strip of a gated weight has 16 gates, then the 16 values that they belong to.
template <typename X>
BATON_INLINE F16 gated(Gate gate, const Weight& weight, int64_t output, const float* sums) {
  return activated<X>(gate, with_bias<X>(weight, output, sums)) *
         with_bias<X>(weight, output + kLanes, sums + kLanes);
}

// Team: rows [rows, width] as tiles.
template <typename X>
void team_tile_rows(const X* x, int64_t rows, int64_t width, X* to, Member& member) {
  member.each((rows + kTileRows - 1) / kTileRows, [&](int64_t tile) {
    for (int64_t r = tile * kTileRows; r < std::min((tile + 1) * kTileRows, rows); r++) {
      for (int64_t k = 0; k < width; k += kTileK) {
        std::memcpy(to + tiled(r, k, width), x + r * width + k, kTileK * sizeof(X));
      }
    }
  });
}

}  // namespace baton
