// What is done to each token, by itself.
#include "rowwise.h"

namespace baton {
namespace {

template <typename T>
void norm_rows(const T* x, T* residual, const float* weight, T* out, int64_t rows, int64_t width,
               float eps, int threads) {
  const Rows16<T> to{out, width, false};
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
  for (int64_t r = 0; r < rows; r++) norm_row(x, residual, weight, to, r, eps);
}

template <typename T>
void gate_rows(const T* gate_up, T* out, int64_t rows, int64_t width, Gate kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
  for (int64_t r = 0; r < rows; r++) {
    const T* gate = gate_up + r * 2 * width;
    for (int64_t i = 0; i < width; i += kLanes) {
      F16 g = load(gate + i), up = load(gate + width + i);
      store(out + r * width + i, activated<T>(kind, g) * up);
    }
  }
}

template <typename T>
void rotate_and_write(const T* qkv, T* queries, int64_t tokens, const Rotate& p, int threads) {
  const int64_t width = (p.num_heads + 2 * p.kv_heads) * p.head_dim;
#pragma omp parallel for num_threads(threads) if (tokens > 4)
  for (int64_t t = 0; t < tokens; t++) rotate_token(qkv + t * width, queries, t, p);
}

}  // namespace
}  // namespace baton

using baton::Bf16;

// [rows, width] -> [rows, width], width a multiple of 16; `residual` null, or added to first.
extern "C" void baton_norm(const void* x, void* residual, const float* weight, void* out,
                           int64_t rows, int64_t width, float eps, int is_bf16, int threads) {
  if (is_bf16) {
    baton::norm_rows(static_cast<const Bf16*>(x), static_cast<Bf16*>(residual), weight,
                     static_cast<Bf16*>(out), rows, width, eps, threads);
  } else {
    baton::norm_rows(static_cast<const float*>(x), static_cast<float*>(residual), weight,
                     static_cast<float*>(out), rows, width, eps, threads);
  }
}

// [rows, 2 * width] -> [rows, width], width a multiple of 16.
extern "C" void baton_gate(const void* gate_up, void* out, int64_t rows, int64_t width,
                           int gate, int is_bf16, int threads) {
  const auto kind = static_cast<baton::Gate>(gate);
  if (is_bf16) {
    baton::gate_rows(static_cast<const Bf16*>(gate_up), static_cast<Bf16*>(out), rows, width, kind,
                     threads);
  } else {
    baton::gate_rows(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, width,
                     kind, threads);
  }
}

// qkv [tokens, (num_heads + 2 * kv_heads) * head_dim] -> queries [tokens, num_heads, head_dim].
extern "C" void baton_rotate(const void* qkv, void* queries, int64_t tokens,
                             const baton::Rotate* rotate, int is_bf16, int threads) {
  if (is_bf16) {
    baton::rotate_and_write(static_cast<const Bf16*>(qkv), static_cast<Bf16*>(queries), tokens,
                            *rotate, threads);
  } else {
    baton::rotate_and_write(static_cast<const float*>(qkv), static_cast<float*>(queries), tokens,
                            *rotate, threads);
  }
}
