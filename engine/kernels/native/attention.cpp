// Attention by itself, for models whose layers are not run as a whole.
#include "attention.h"

namespace baton {
namespace {

template <typename T>
void attend(const T* queries, T* out, const Pool& pool, const Batch& batch, int threads) {
  AttentionPlan plan(pool, batch, threads);
  const Rows16<T> rows{out, batch.num_heads * pool.head_dim, false};
  Team team;
#pragma omp parallel num_threads(threads)
  {
    Member member(team);
    AmxTiles amx(sizeof(T) == 2);
    team_attend(queries, rows, pool, batch, plan, amx, scratch_of<T>(pool.head_dim), member);
  }
}

}  // namespace
}  // namespace baton

// queries, out: [num_tokens, num_heads, head_dim]; head_dim a multiple of 32,
// num_heads / kv_heads at most 96.
extern "C" void baton_attend(const void* queries, void* out, const baton::Pool* pool,
                             const baton::Batch* batch, int is_bf16, int threads) {
  if (is_bf16) {
    baton::attend(static_cast<const baton::Bf16*>(queries), static_cast<baton::Bf16*>(out), *pool,
                  *batch, threads);
  } else {
    baton::attend(static_cast<const float*>(queries), static_cast<float*>(out), *pool, *batch,
                  threads);
  }
}
