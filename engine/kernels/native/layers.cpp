// Whole layers of a dense decoder in one parallel region: nothing returns to the
// caller between the parts, and what one part writes the next finds in the cache, in its order.
#include "rowwise.h"

namespace baton {

struct Layer {
  const float *input_norm, *mlp_norm;
  const float *attention_out_norm, *mlp_out_norm;  // of what is added to the residual, or null
  const float *query_norm, *key_norm;              // or null
  Weight qkv, out, gate_up, down;                  // gate_up is gated
  Pool pool;
  int64_t group;     // among the step's
  int64_t window;    // 0: none
  int64_t rotation;  // among the step's
};

struct Rotation {
  const float *cos, *sin;  // [rows, head_dim / 2]
};

struct Group {
  const int64_t* slots;  // [rows]
  const int32_t* tables;
  const int64_t* table_starts;
};

struct Step {
  void* residual;  // [rows, hidden], in and out
  int64_t rows, hidden, num_heads;
  const Rotation* rotations;
  const int64_t *query_starts, *context_lens;
  int64_t num_seqs;
  const Group* groups;
  // Room for tiles of the widest input, for qkv (rows 32 longer), for queries and for [rows, hidden],
  // and each for a tile's rows more than the step has.
  void *tiles, *more_tiles, *qkv, *queries, *added;
  float eps, scale;
  Gate gate;
};

namespace {

constexpr int64_t kQkvPadding = 32;  // between rows: a power of two apart they share cache sets
constexpr int64_t kTokens = 8;  // that a thread takes at a time

struct LayerWork {
  Batch batch;
  AttentionPlan* plan;
};

// What each layer attends to; layers of equal windows and tables share a plan.
std::vector<LayerWork> plan_layers(const Layer* layers, int64_t count, const Step& step,
                                   std::vector<std::unique_ptr<AttentionPlan>>& plans,
                                   int threads) {
  std::vector<LayerWork> work;
  for (int64_t i = 0; i < count; i++) {
    const Layer& layer = layers[i];
    const Group& group = step.groups[layer.group];
    AttentionPlan* plan = nullptr;
    for (int64_t j = 0; j < i && plan == nullptr; j++) {
      if (layers[j].group == layer.group && layers[j].window == layer.window) plan = work[j].plan;
    }
    Batch batch{step.query_starts, step.context_lens, group.tables,
                group.table_starts, step.num_seqs,    step.num_heads,
                layer.window,       step.scale};
    if (plan == nullptr) {
      plans.push_back(std::make_unique<AttentionPlan>(layer.pool, batch, threads));
      plan = plans.back().get();
    }
    work.push_back({batch, plan});
  }
  return work;
}

template <typename T>
struct Run {
  const Step& step;
  const AmxTiles& amx;
  ProductScratch& products;
  Scratch<T>& attention;
  Member& member;

  template <typename Do>
  void each_token(Do token) {
    member.each((step.rows + kTokens - 1) / kTokens, [&](int64_t part) {
      for (int64_t t = part * kTokens; t < std::min((part + 1) * kTokens, step.rows); t++) token(t);
    });
  }

  template <typename Done>
  void product(const T* x, const Weight& weight, Done done) {
    team_product(x, step.rows, weight, amx, products, member, done);
  }

  void norm(const float* weight, T* to) {
    const T* residual = static_cast<const T*>(step.residual);
    const Rows16<T> tiles{to, step.hidden, true};
    each_token([&](int64_t t) {
      norm_row<T>(residual, nullptr, weight, tiles, t, step.eps);
    });
  }

  // To the residual, by way of `out_norm` if there is one.
  void add_product(const T* x, const Weight& weight, const float* out_norm) {
    T *residual = static_cast<T*>(step.residual), *added = static_cast<T*>(step.added);
    if (out_norm == nullptr) {
      return product(x, weight, [&](int64_t row, int64_t output, const float* sums) {
        store_row<true, T>(weight, output, sums, residual + row * step.hidden + output);
      });
    }
    product(x, weight, [&](int64_t row, int64_t output, const float* sums) {
      store_row<false, T>(weight, output, sums, added + row * step.hidden + output);
    });
    const Rows16<T> normed{added, step.hidden, false};
    each_token([&](int64_t t) {
      norm_row<T>(added, nullptr, out_norm, normed, t, step.eps);
      T *from = added + t * step.hidden, *to = residual + t * step.hidden;
      for (int64_t i = 0; i < step.hidden; i += kLanes) store(to + i, load(to + i) + load(from + i));
    });
  }

  void layer(const Layer& l, const LayerWork& work) {
    T *tiles = static_cast<T*>(step.tiles), *more_tiles = static_cast<T*>(step.more_tiles);
    T *qkv = static_cast<T*>(step.qkv), *queries = static_cast<T*>(step.queries);
    const int64_t stride = l.qkv.outputs + kQkvPadding;
    norm(l.input_norm, tiles);
    product(tiles, l.qkv, [&](int64_t row, int64_t output, const float* sums) {
      store_row<false, T>(l.qkv, output, sums, qkv + row * stride + output);
    });
    const Pool& pool = l.pool;
    const Rotation& rotation = step.rotations[l.rotation];
    const Rotate rotate{rotation.cos, rotation.sin, l.query_norm, l.key_norm,
                        step.groups[l.group].slots, const_cast<char*>(pool.keys),
                        const_cast<char*>(pool.values), pool.region_stride, pool.block_stride,
                        pool.blocks_per_region, step.num_heads, pool.kv_heads, pool.block_size,
                        pool.head_dim, step.eps};
    each_token([&](int64_t t) { rotate_token(qkv + t * stride, queries, t, rotate); });
    const Rows16<T> attended{tiles, l.out.inputs, true};
    team_attend(queries, attended, pool, work.batch, *work.plan, amx, attention, member);
    add_product(tiles, l.out, l.attention_out_norm);
    norm(l.mlp_norm, tiles);
    product(tiles, l.gate_up, [&](int64_t row, int64_t output, const float* sums) {
      store(more_tiles + tiled(row, output / 2, l.down.inputs),
            gated<T>(step.gate, l.gate_up, output, sums));
    });
    add_product(more_tiles, l.down, l.mlp_out_norm);
  }
};

template <typename T>
void run_layers(const Layer* layers, int64_t count, const Step& step, int threads) {
  std::vector<std::unique_ptr<AttentionPlan>> plans;
  const std::vector<LayerWork> work = plan_layers(layers, count, step, plans, threads);
  Team team;
#pragma omp parallel num_threads(threads)
  {
    Member member(team);
    AmxTiles amx(sizeof(T) == 2);
    static thread_local ProductScratch products;
    Run<T> run{step, amx, products, scratch_of<T>(layers[0].pool.head_dim), member};
    for (int64_t i = 0; i < count; i++) run.layer(layers[i], work[i]);
  }
}

}  // namespace
}  // namespace baton

// Run `count` layers, of equal head sizes, on a step's tokens: writes their KV and the residual.
extern "C" void baton_layers(const baton::Layer* layers, int64_t count, const baton::Step* step,
                             int is_bf16, int threads) {
  if (is_bf16) {
    baton::run_layers<baton::Bf16>(layers, count, *step, threads);
  } else {
    baton::run_layers<float>(layers, count, *step, threads);
  }
}
