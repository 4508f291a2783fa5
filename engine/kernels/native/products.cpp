// Packing of weights, and products by themselves.
#include "products.h"

namespace baton {
namespace {

template <typename W>
void store_words(char* to, U16 words) {
  if constexpr (sizeof(W) > 1) return store_raw(to, words);
  store_raw(to, of_parts<H16>([&](int i) {
    return __builtin_convertvector(words.parts[i], H16::Part);
  }));
}

// One strip's words from rows of weights; rows that are null are zeros.
template <typename W>
void pack_strip(const W* const* rows, int64_t inputs, char* to) {
  constexpr int64_t kWords = kTileK / kPerWord<W>, kBytes = kLanes * kWordBytes<W>;
  for (int64_t k = 0; k < inputs; k += kTileK) {
    for (int64_t panel = 0; panel < 2; panel++) {
      char* at = to + k / kTileK * kTileBytes<W> + panel * panel_bytes<W>(inputs / kTileK);
      for (int64_t word = 0; word < kWords; word += kLanes) {
        U16 tile[kLanes];
        for (int i = 0; i < kLanes; i++) {
          const W* row = rows[panel * kLanes + i];
          if (row == nullptr) tile[i] = U16{};
          else tile[i] = load_words<W>(reinterpret_cast<const char*>(row + k + word * kPerWord<W>));
        }
        transpose(tile);
        for (int i = 0; i < kLanes; i++, at += kBytes) store_words<W>(at, tile[i]);
      }
    }
  }
}

struct Rows {
  const char* data;
  int64_t count, stride_bytes;
};

template <typename W>
void pack(const Rows* parts, int64_t num_parts, bool is_gated, int64_t inputs, int64_t outputs,
          char* to, int threads) {
  auto row = [&](int64_t output) -> const W* {
    if (output >= outputs) return nullptr;
    if (is_gated) {
      output = output / kStrip * kLanes + output % kLanes + output % kStrip / kLanes * (outputs / 2);
    }
    for (const Rows* part = parts; part < parts + num_parts; part++) {
      if (output < part->count) {
        return reinterpret_cast<const W*>(part->data + output * part->stride_bytes);
      }
      output -= part->count;
    }
    return nullptr;
  };
  const int64_t strips = (outputs + kStrip - 1) / kStrip;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (int64_t strip = 0; strip < strips; strip++) {
    const W* rows[kStrip];
    for (int64_t i = 0; i < kStrip; i++) rows[i] = row(strip * kStrip + i);
    pack_strip(rows, inputs, to + strip * (inputs / kTileK) * kStripBytes<W>);
  }
}

template <typename X, typename Out>
void product(const X* x, int64_t rows, const Weight& weight, Gate gate, X* tiles, Out* out,
             int threads) {
  Team team;
#pragma omp parallel num_threads(threads)
  {
    Member member(team);
    AmxTiles amx(weight.kind != kFloat && sizeof(X) == 2);
    static thread_local ProductScratch s;
    team_tile_rows(x, rows, weight.inputs, tiles, member);
    const int64_t width = gate == Gate::kNone ? weight.outputs : weight.outputs / 2;
    team_product(tiles, rows, weight, amx, s, member,
                 [&](int64_t row, int64_t output, const float* sums) {
                   if (gate == Gate::kNone) {
                     store_row<false, X>(weight, output, sums, out + row * width + output);
                   } else {
                     store(out + row * width + output / 2, gated<X>(gate, weight, output, sums));
                   }
                 });
  }
}

}  // namespace
}  // namespace baton

using baton::Bf16;

// Bytes of a packed weight, without scales.
extern "C" int64_t baton_packed_bytes(int64_t inputs, int64_t outputs, int64_t kind) {
  const int64_t count = inputs * baton::round_up(outputs, baton::kStrip);
  return count * (kind == baton::kFloat ? 4 : kind == baton::kBf16 ? 2 : 1);
}

// Pack the rows of all parts, [outputs, inputs] together. `is_gated`: the first half are gates, the
// second what they gate; outputs / 2 is a multiple of 16.
extern "C" void baton_pack(const baton::Rows* parts, int64_t num_parts, int is_gated, int64_t inputs,
                           int64_t outputs, int64_t kind, void* to, int threads) {
  auto by = [&](auto number) {
    baton::pack<decltype(number)>(parts, num_parts, is_gated, inputs, outputs,
                                  static_cast<char*>(to), threads);
  };
  if (kind == baton::kInt8) by(baton::Int8{});
  else if (kind == baton::kBf16) by(Bf16{});
  else by(float{});
}

// x [rows, inputs] -> out [rows, outputs], or [rows, outputs / 2] if gated, of x's type, or float if
// `wide`; `tiles`: room for x and 16 rows more.
extern "C" void baton_product(const void* x, int64_t rows, const baton::Weight* weight, int gate,
                              void* tiles, void* out, int is_bf16, int wide, int threads) {
  const auto kind = static_cast<baton::Gate>(gate);
  if (!is_bf16) {
    baton::product(static_cast<const float*>(x), rows, *weight, kind,
                   static_cast<float*>(tiles), static_cast<float*>(out), threads);
  } else if (wide) {
    baton::product(static_cast<const Bf16*>(x), rows, *weight, kind, static_cast<Bf16*>(tiles),
                   static_cast<float*>(out), threads);
  } else {
    baton::product(static_cast<const Bf16*>(x), rows, *weight, kind, static_cast<Bf16*>(tiles),
                   static_cast<Bf16*>(out), threads);
  }
}
