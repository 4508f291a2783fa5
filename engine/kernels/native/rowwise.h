// What is done to each token by itself: norms, activation, rotation and the write into the pool.
#pragma once

#include "attention.h"

namespace baton {

// Rotation of one step and where its tokens' KV goes; strides in bytes.
struct Rotate {
  const float* cos;  // [num_tokens, head_dim / 2]
  const float* sin;
  const float* query_norm;  // [head_dim], or null
  const float* key_norm;
  const int64_t* slots;  // [num_tokens]
  char* keys;
  char* values;
  int64_t region_stride, block_stride, blocks_per_region;
  int64_t num_heads, kv_heads, block_size, head_dim;
  float eps;
};

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
void norm_row(const T* x, T* residual, const float* weight, const Rows16<T>& out, int64_t r, float eps) {
  const int64_t width = out.width;
  const T* from = x + r * width;
  if (residual != nullptr) {
    T* sum = residual + r * width;
    for (int64_t i = 0; i < width; i += kLanes) store(sum + i, load(sum + i) + load(from + i));
    from = sum;
  }
  float scale = inverse_rms(from, width, eps);
  for (int64_t i = 0; i < width; i += kLanes) {
    store(out.at(r, i), load(from + i) * scale * load(weight + i));
  }
}

// Norm (when there is a weight) and rotate one head.
template <typename T>
void rotate_head(const T* from, const float* weight, const float* cos, const float* sin, int64_t dim,
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

// Norm and rotate token t's queries and keys; write its keys and values to their slot. `from`: its
// [(num_heads + 2 * kv_heads) * head_dim].
template <typename T>
void rotate_token(const T* from, T* queries, int64_t t, const Rotate& p) {
  const int64_t dim = p.head_dim;
  const float *cos = p.cos + t * dim / 2, *sin = p.sin + t * dim / 2;
  for (int64_t h = 0; h < p.num_heads; h++) {
    rotate_head(from + h * dim, p.query_norm, cos, sin, dim, p.eps,
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
    rotate_head(key_from + h * dim, p.key_norm, cos, sin, dim, p.eps, keys + to);
    std::memcpy(values + to, value_from + h * dim, dim * sizeof(T));
  }
}

}  // namespace baton
