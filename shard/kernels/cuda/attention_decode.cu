// Attention of one new token a sequence over its pages (flash-decoding, Dao et al. 2023): pages are
// dealt to splits and within a split to warps, each with a running softmax of its own; partial sums
// meet in shared memory, then, where a sequence has several splits, in the split that ends last.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int STAGES = 3;
constexpr int MOST_SPLITS = 32; // a warp's lanes

// Grid: (head tiles, splits, sequences). `partial`: [sequence][split][head][HEAD_DIM + 2] floats.
// `arrivals`: one counter a (sequence, head tile), zero before and after.
template <int HEAD_DIM>
__device__ void attention(const bf16 *qkv, int row_len, const bf16 *pages, int kv_heads, int heads,
                          const int4 *sequences, const uint32_t *tables, const HeadTiles &tiles,
                          Scoring scoring, float *partial, uint32_t *arrivals, bf16 *out) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int PIECES = HEAD_DIM / 8, K_BYTES = 16 * HEAD_DIM * 2, STAGE_BYTES = 2 * K_BYTES;
    __shared__ float warp_max[WARPS][16], warp_sums[WARPS][16];
    __shared__ float factors[16][MOST_SPLITS];
    __shared__ uint32_t arrived;
    wait_for_inputs();
    let_next_start();
    const int4 sequence = sequences[blockIdx.z];
    const int context = sequence.z;
    if (context == 0) return;
    const int kv_head = tiles.kv_head[blockIdx.x], first_head = tiles.first_head[blockIdx.x];
    const int count = tiles.count[blockIdx.x];
    const int oldest = scoring.window > 0 ? max(0, context - scoring.window) : 0;
    const int first_page = oldest / BLOCK_TOKENS, end_page = (context + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int splits = gridDim.y;
    // Two pages a warp before a second split pays for meeting.
    const int per_split = max(2 * WARPS, (end_page - first_page + splits - 1) / splits);
    const int used = (end_page - first_page + per_split - 1) / per_split;
    if (blockIdx.y >= used) return;
    const int begin = first_page + blockIdx.y * per_split, end = min(begin + per_split, end_page);
    const uint32_t *table = tables + sequence.w;

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    unsigned char *mine = shared + warp * STAGES * STAGE_BYTES;
    const uint32_t mine_address = shared_address(mine);
    const int steps = begin + warp < end ? (end - begin - warp + WARPS - 1) / WARPS : 0;

    // Queries: row g and g + 8 of the tile; the same order of dimensions as the keys.
    uint4 low[HEAD_DIM / 32], high[HEAD_DIM / 32];
    const bf16 *q = qkv + size_t(sequence.x) * row_len + t * 8;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) {
        low[i] = g < count ? *reinterpret_cast<const uint4 *>(q + (first_head + g) * HEAD_DIM + i * 32)
                           : make_uint4(0, 0, 0, 0);
        high[i] = g + 8 < count
            ? *reinterpret_cast<const uint4 *>(q + (first_head + g + 8) * HEAD_DIM + i * 32)
            : make_uint4(0, 0, 0, 0);
    }

    auto copy = [&](int step) {
        if (step < steps) {
            const int page = begin + warp + step * WARPS;
            const bf16 *k = pages + (size_t(table[page]) * kv_heads + kv_head) * 2 * BLOCK_TOKENS * HEAD_DIM;
            const bf16 *v = k + BLOCK_TOKENS * HEAD_DIM;
            const uint32_t stage = mine_address + (step % STAGES) * STAGE_BYTES;
            // Keys go to the lane that will multiply them.
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 32; i++)
                    copy16(stage + ((j * (HEAD_DIM / 32) + i) * 32 + lane) * 16,
                           k + (j * 8 + g) * HEAD_DIM + i * 32 + t * 8, true);
            // Values of tokens that are not there yet must be numbers, since they meet a weight of 0.
#pragma unroll
            for (int i = 0; i < 16 * PIECES / 32; i++) {
                const int index = i * 32 + lane, token = index / PIECES, piece = index % PIECES;
                copy16(stage + K_BYTES + swizzled<HEAD_DIM>(token, piece), v + token * HEAD_DIM + piece * 8,
                       page * BLOCK_TOKENS + token < context);
            }
        }
        copy_commit();
    };

    const float to_log2 = scoring.scale * LOG2_E;
    float largest[2] = {-INFINITY, -INFINITY}, sums[2] = {0.0f, 0.0f};
    float totals[HEAD_DIM / 8][4] = {};
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) copy(step);
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncwarp();
        const unsigned char *stage = mine + (step % STAGES) * STAGE_BYTES;
        float scores[2][4] = {};
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; i++) {
                const uint4 k =
                    reinterpret_cast<const uint4 *>(stage)[(j * (HEAD_DIM / 32) + i) * 32 + lane];
                mma(scores[j], low[i].x, high[i].x, low[i].y, high[i].y, k.x, k.y);
                mma(scores[j], low[i].z, high[i].z, low[i].w, high[i].w, k.z, k.w);
            }
        const int first_token = (begin + warp + step * WARPS) * BLOCK_TOKENS;
        if (scoring.soft_cap > 0.0f) {
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    scores[j][k] = capped(scores[j][k] * scoring.scale, scoring.soft_cap) / scoring.scale;
        }
        float page_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int token = first_token + j * 8 + t * 2 + (k & 1);
                const float score = scores[j][k] * to_log2;
                scores[j][k] = token >= oldest && token < context ? score : -INFINITY;
                page_max[k >> 1] = fmaxf(page_max[k >> 1], scores[j][k]);
            }
        float correction[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            page_max[r] = fmaxf(page_max[r], __shfl_xor_sync(0xffffffffu, page_max[r], 1));
            page_max[r] = fmaxf(page_max[r], __shfl_xor_sync(0xffffffffu, page_max[r], 2));
            const float larger = fmaxf(largest[r], page_max[r]);
            correction[r] = power_of_two(largest[r] - larger);
            largest[r] = larger;
            sums[r] *= correction[r];
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                scores[j][k] = power_of_two(scores[j][k] - largest[k >> 1]);
                sums[k >> 1] += scores[j][k];
            }
        const uint32_t p0 = pack(scores[0][0], scores[0][1]), p1 = pack(scores[0][2], scores[0][3]);
        const uint32_t p2 = pack(scores[1][0], scores[1][1]), p3 = pack(scores[1][2], scores[1][3]);
        const uint32_t v_address = mine_address + (step % STAGES) * STAGE_BYTES + K_BYTES;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            uint32_t v[4];
            load_matrices_transposed(v, v_address + swizzled<HEAD_DIM>(lane & 15, i * 2 + (lane >> 4)));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float(&total)[4] = totals[i * 2 + j];
                total[0] *= correction[0];
                total[1] *= correction[0];
                total[2] *= correction[1];
                total[3] *= correction[1];
                mma(total, p0, p1, p2, p3, v[j * 2], v[j * 2 + 1]);
            }
        }
        __syncwarp();
        copy(step + STAGES - 1);
    }
    copy_wait<0>();
    __syncthreads();

#pragma unroll
    for (int r = 0; r < 2; r++) {
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 1);
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 2);
        if (t == 0) {
            warp_max[warp][g + r * 8] = largest[r];
            warp_sums[warp][g + r * 8] = sums[r];
        }
    }
    float *parts = reinterpret_cast<float *>(shared); // [warp][16][HEAD_DIM]
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            parts[(warp * 16 + g + (k >> 1) * 8) * HEAD_DIM + i * 8 + t * 2 + (k & 1)] = totals[i][k];
    __syncthreads();
    constexpr int RECORD = HEAD_DIM + 2;
    float *records = partial + (size_t(blockIdx.z) * splits * heads) * RECORD;
    for (int i = threadIdx.x; i < count * HEAD_DIM; i += blockDim.x) {
        const int row = i / HEAD_DIM, dim = i % HEAD_DIM;
        float largest_of_all = -INFINITY;
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest_of_all = fmaxf(largest_of_all, warp_max[w][row]);
        float value = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float factor = power_of_two(warp_max[w][row] - largest_of_all);
            value += factor * parts[(w * 16 + row) * HEAD_DIM + dim];
            sum += factor * warp_sums[w][row];
        }
        const int head = first_head + row;
        if (used == 1) {
            out[(size_t(sequence.x) * heads + head) * HEAD_DIM + dim] = narrow<bf16>(value / sum);
        } else {
            float *record = records + (size_t(blockIdx.y) * heads + head) * RECORD;
            record[dim] = value;
            if (dim == 0) {
                record[HEAD_DIM] = largest_of_all;
                record[HEAD_DIM + 1] = sum;
            }
        }
    }
    if (used == 1) return;
    __threadfence();
    __syncthreads();
    uint32_t *counter = arrivals + blockIdx.z * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) arrived = atomicAdd(counter, 1);
    __syncthreads();
    if (arrived != used - 1) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    // What each split counts for: a lane a split.
    for (int row = warp; row < count; row += WARPS) {
        const float *record = records + (size_t(lane) * heads + first_head + row) * RECORD + HEAD_DIM;
        const float split_max = lane < used ? __ldcg(record) : -INFINITY;
        const float split_sum = lane < used ? __ldcg(record + 1) : 0.0f;
        float most = split_max;
#pragma unroll
        for (int i = 16; i > 0; i >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        const float factor = power_of_two(split_max - most);
        factors[row][lane] = factor / warp_sum(factor * split_sum);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * HEAD_DIM / 2; i += blockDim.x) {
        const int row = i / (HEAD_DIM / 2), head = first_head + row, dim = i % (HEAD_DIM / 2) * 2;
        const float *values = records + size_t(head) * RECORD + dim;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
        for (int split = 0; split < used; split++) {
            const float2 value = __ldcg(reinterpret_cast<const float2 *>(values + size_t(split) * heads * RECORD));
            sum.x += factors[row][split] * value.x;
            sum.y += factors[row][split] * value.y;
        }
        *reinterpret_cast<uint32_t *>(out + (size_t(sequence.x) * heads + head) * HEAD_DIM + dim) = pack(sum.x, sum.y);
    }
}

#define ATTENTION_DECODE(HEAD_DIM, BLOCKS)                                                          \
    extern "C" __global__ void __launch_bounds__(128, BLOCKS) attention_decode_##HEAD_DIM(          \
        const bf16 *qkv, int row_len, const bf16 *pages, int kv_heads, int heads,                   \
        const int4 *sequences, const uint32_t *tables, const HeadTiles tiles, Scoring scoring,      \
        float *partial, uint32_t *arrivals, bf16 *out) {                                            \
        attention<HEAD_DIM>(qkv, row_len, pages, kv_heads, heads, sequences, tables, tiles,         \
                            scoring, partial, arrivals, out);                                       \
    }
// Shared memory: 4 warps * 3 stages * 64 * HEAD_DIM bytes.
ATTENTION_DECODE(64, 4)
ATTENTION_DECODE(128, 2)
ATTENTION_DECODE(256, 1)
