// What is done to each token by itself: norms, activation, rotation and the write into the pool.
#include "vec.h"

namespace baton {

// Rotation of one step and where its tokens' KV goes; strides in bytes.
struct Rotate {
  const float* cos;  // [num_tokens, head_dim / 2]
  const float* sin;
  const void* query_norm;  // [head_dim], or null
  const void* key_norm;
  const int64_t* slots;  // [num_tokens]
  char* keys;
  char* values;
  int64_t region_stride, block_stride, blocks_per_region;
  int64_t num_heads, kv_heads, block_size, head_dim;
  float eps;
};

namespace {

template <typename T>
float inverse_rms(const T* x, int64_t width, float eps) {
  F16 squares{};
  for (int64_t i = 0; i < width; i += kLanes) {
    F16 v = load(x + i);
    squares += v * v;
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
}

template <typename T>
void norm_rows(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t width,
               float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
  for (int64_t r = 0; r < rows; r++) {
    const T* from = x + r * width;
    if (residual != nullptr) {
      T* sum = residual + r * width;
      for (int64_t i = 0; i < width; i += kLanes) store(sum + i, load(sum + i) + load(from + i));
      from = sum;
    }
    float scale = inverse_rms(from, width, eps);
    for (int64_t i = 0; i < width; i += kLanes) {
      store(out + r * width + i, load(from + i) * scale * load(weight + i));
    }
  }
}

template <typename T>
void swiglu_rows(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
  for (int64_t r = 0; r < rows; r++) {
    const T* gate = gate_up + r * 2 * width;
    for (int64_t i = 0; i < width; i += kLanes) {
      F16 g = load(gate + i), up = load(gate + width + i);
      F16 magnitude = exp(max(-g, splat(-87.0f)) > 87.0f ? splat(87.0f) : -g);
      store(out + r * width + i, g / (1.0f + magnitude) * up);
    }
  }
}

// Norm (when there is a weight) and rotate one head.
template <typename T>
void rotate_head(const T* from, const T* weight, const float* cos, const float* sin, int64_t dim,
                 float eps, T* to) {
  const int64_t half = dim / 2;
  F16 scale = splat(weight == nullptr ? 1.0f : inverse_rms(from, dim, eps));
  for (int64_t i = 0; i < half; i += kLanes) {
    F16 low = load(from + i) * scale, high = load(from + half + i) * scale;
    if (weight != nullptr) {
      low *= load(weight + i);
      high *= load(weight + half + i);
    }
    F16 c = load(cos + i), s = load(sin + i);
    store(to + i, low * c - high * s);
    store(to + half + i, high * c + low * s);
  }
}

template <typename T>
void rotate_and_write(const T* qkv, T* queries, int64_t tokens, const Rotate& p, int threads) {
  const int64_t dim = p.head_dim, width = (p.num_heads + 2 * p.kv_heads) * dim;
  const T* query_norm = static_cast<const T*>(p.query_norm);
  const T* key_norm = static_cast<const T*>(p.key_norm);
#pragma omp parallel for num_threads(threads) if (tokens > 4)
  for (int64_t t = 0; t < tokens; t++) {
    const T* from = qkv + t * width;
    const float *cos = p.cos + t * dim / 2, *sin = p.sin + t * dim / 2;
    for (int64_t h = 0; h < p.num_heads; h++) {
      rotate_head(from + h * dim, query_norm, cos, sin, dim, p.eps,
                  queries + (t * p.num_heads + h) * dim);
    }
    int64_t block = p.slots[t] / p.block_size, offset = p.slots[t] % p.block_size;
    int64_t start = block / p.blocks_per_region * p.region_stride +
                    block % p.blocks_per_region * p.block_stride;
    T* keys = reinterpret_cast<T*>(p.keys + start) + offset * dim;
    T* values = reinterpret_cast<T*>(p.values + start) + offset * dim;
    const T* key_from = from + p.num_heads * dim;
    const T* value_from = key_from + p.kv_heads * dim;
    for (int64_t h = 0; h < p.kv_heads; h++) {
      int64_t to = h * p.block_size * dim;
      rotate_head(key_from + h * dim, key_norm, cos, sin, dim, p.eps, keys + to);
      std::memcpy(values + to, value_from + h * dim, dim * sizeof(T));
    }
  }
}

}  // namespace
}  // namespace baton

using baton::Bf16;

// [rows, width] -> [rows, width], width a multiple of 16; `residual` null, or added to first.
extern "C" void baton_norm(const void* x, void* residual, const void* weight, void* out,
                           int64_t rows, int64_t width, float eps, int is_bf16, int threads) {
  if (is_bf16) {
    baton::norm_rows(static_cast<const Bf16*>(x), static_cast<Bf16*>(residual),
                     static_cast<const Bf16*>(weight), static_cast<Bf16*>(out), rows, width, eps,
                     threads);
  } else {
    baton::norm_rows(static_cast<const float*>(x), static_cast<float*>(residual),
                     static_cast<const float*>(weight), static_cast<float*>(out), rows, width, eps,
                     threads);
  }
}

// [rows, 2 * width] -> [rows, width], width a multiple of 16.
extern "C" void baton_swiglu(const void* gate_up, void* out, int64_t rows, int64_t width,
                             int is_bf16, int threads) {
  if (is_bf16) {
    baton::swiglu_rows(static_cast<const Bf16*>(gate_up), static_cast<Bf16*>(out), rows, width,
                       threads);
  } else {
    baton::swiglu_rows(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, width,
                       threads);
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
