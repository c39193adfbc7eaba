// Attention for every type and head size, one block a (row, head): the path of f32, and of heads
// that the tensor-core kernels have no tile for.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int DIMS = 16; // a lane's share: heads of at most 512

template <typename T>
__device__ void attention(const T *qkv, int row_len, const T *pages, int kv_heads, int heads,
                          int head_dim, const int4 *step_rows, const int4 *sequences,
                          const uint32_t *tables, const KvOfHead &kv_of_head, Scoring scoring, T *out) {
    extern __shared__ float parts[]; // [WARPS][head_dim + 2]
    wait_for_inputs();
    let_next_start();
    const int4 row = step_rows[blockIdx.x];
    if (static_cast<uint32_t>(row.z) == NO_SLOT) return;
    const int head = blockIdx.y, kv_head = kv_of_head.kv_head[head];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int position = row.y;
    const int oldest = scoring.window > 0 ? max(0, position - scoring.window + 1) : 0;
    const uint32_t *table = tables + sequences[row.w].w;
    const T *q = qkv + size_t(blockIdx.x) * row_len + head * head_dim;
    float query[DIMS], totals[DIMS];
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        const int dim = i * 32 + lane;
        query[i] = dim < head_dim ? widen(q[dim]) : 0.0f;
        totals[i] = 0.0f;
    }
    float largest = -INFINITY, sum = 0.0f;
    for (int token = oldest + warp; token <= position; token += WARPS) {
        const T *k = pages +
            ((size_t(table[token / BLOCK_TOKENS]) * kv_heads + kv_head) * 2 * BLOCK_TOKENS + token % BLOCK_TOKENS) * head_dim;
        const T *v = k + BLOCK_TOKENS * head_dim;
        float product = 0.0f;
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
            const int dim = i * 32 + lane;
            if (dim < head_dim) product += query[i] * widen(k[dim]);
        }
        const float score = capped(warp_sum(product) * scoring.scale, scoring.soft_cap);
        const float larger = fmaxf(largest, score);
        const float correction = expf(largest - larger), weight = expf(score - larger);
        largest = larger;
        sum = sum * correction + weight;
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
            const int dim = i * 32 + lane;
            if (dim < head_dim) totals[i] = totals[i] * correction + weight * widen(v[dim]);
        }
    }
    float *part = parts + warp * (head_dim + 2);
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        const int dim = i * 32 + lane;
        if (dim < head_dim) part[dim] = totals[i];
    }
    if (lane == 0) {
        part[head_dim] = largest;
        part[head_dim + 1] = sum;
    }
    __syncthreads();
    float largest_of_all = -INFINITY, sum_of_all = 0.0f;
    for (int w = 0; w < WARPS; w++) largest_of_all = fmaxf(largest_of_all, parts[w * (head_dim + 2) + head_dim]);
    for (int w = 0; w < WARPS; w++)
        sum_of_all += expf(parts[w * (head_dim + 2) + head_dim] - largest_of_all) * parts[w * (head_dim + 2) + head_dim + 1];
    for (int dim = threadIdx.x; dim < head_dim; dim += blockDim.x) {
        float value = 0.0f;
        for (int w = 0; w < WARPS; w++)
            value += expf(parts[w * (head_dim + 2) + head_dim] - largest_of_all) * parts[w * (head_dim + 2) + dim];
        out[(size_t(blockIdx.x) * heads + head) * head_dim + dim] = narrow<T>(value / sum_of_all);
    }
}
#define ATTENTION_PLAIN(NAME, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                               \
        NAME(const T *qkv, int row_len, const T *pages, int kv_heads, int heads, int head_dim,      \
             const int4 *step_rows, const int4 *sequences, const uint32_t *tables,                  \
             const KvOfHead kv_of_head, Scoring scoring, T *out) {                                  \
        attention<T>(qkv, row_len, pages, kv_heads, heads, head_dim, step_rows, sequences, tables,  \
                     kv_of_head, scoring, out);                                                     \
    }
ATTENTION_PLAIN(attention_plain_f32, float)
ATTENTION_PLAIN(attention_plain_bf16, bf16)
