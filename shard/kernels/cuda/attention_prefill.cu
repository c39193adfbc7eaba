// Causal attention of many rows a sequence over its pages, on tensor cores (FlashAttention-2, Dao
// 2023, arXiv:2307.08691). A block takes one query head and TILE rows of one sequence.
#include "attention.cuh"

constexpr int TOKENS = 64; // keys a step

// Grid: (work items, heads). `work`: (sequence, first of its rows).
template <int HEAD_DIM, int ROW_TILES, int WARPS>
__device__ void attention(const bf16 *qkv, int row_len, const bf16 *pages, int kv_heads, int heads,
                          const int4 *sequences, const uint32_t *tables, const int2 *work,
                          const KvOfHead &kv_of_head, Scoring scoring, bf16 *out) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int TILE = WARPS * ROW_TILES * 16, PIECES = HEAD_DIM / 8, THREADS = WARPS * 32;
    constexpr int Q_BYTES = TILE * HEAD_DIM * 2, KV_BYTES = TOKENS * HEAD_DIM * 2;
    wait_for_inputs();
    let_next_start();
    const int2 item = work[blockIdx.x];
    const int4 sequence = sequences[item.x];
    const int head = blockIdx.y, kv_head = kv_of_head.kv_head[head];
    const int rows = min(TILE, sequence.y - item.y);
    const int first_position = sequence.z - sequence.y + item.y;
    const int end = first_position + rows;
    const int oldest = scoring.window > 0 ? max(0, first_position - scoring.window + 1) : 0;
    const uint32_t *table = tables + sequence.w;
    const uint32_t q_address = shared_address(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

    const bf16 *q = qkv + size_t(sequence.x + item.y) * row_len + head * HEAD_DIM;
    for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        copy16(q_address + swizzled<HEAD_DIM>(row, piece), q + size_t(min(row, rows - 1)) * row_len + piece * 8,
               row < rows);
    }
    auto copy = [&](int step) {
        const uint32_t k_address = q_address + Q_BYTES + (step & 1) * 2 * KV_BYTES;
        for (int i = threadIdx.x; i < TOKENS * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES, token = step * TOKENS + row;
            const bool keep = token < end;
            const size_t block = table[keep ? token / BLOCK_TOKENS : 0];
            const bf16 *k = pages + ((block * kv_heads + kv_head) * 2 * BLOCK_TOKENS + token % BLOCK_TOKENS) * HEAD_DIM +
                piece * 8;
            copy16(k_address + swizzled<HEAD_DIM>(row, piece), k, keep);
            copy16(k_address + KV_BYTES + swizzled<HEAD_DIM>(row, piece), k + BLOCK_TOKENS * HEAD_DIM, keep);
        }
    };

    float largest[ROW_TILES][2], sums[ROW_TILES][2];
    float totals[ROW_TILES][HEAD_DIM / 8][4] = {};
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[m][r] = -INFINITY;
            sums[m][r] = 0.0f;
        }
    const int first_row = warp * ROW_TILES * 16;
    const int first_step = oldest / TOKENS, end_step = (end + TOKENS - 1) / TOKENS;
    copy(first_step);
    copy_commit();
    for (int step = first_step; step < end_step; step++) {
        if (step + 1 < end_step) copy(step + 1);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        const uint32_t k_address = q_address + Q_BYTES + (step & 1) * 2 * KV_BYTES;
        const uint32_t v_address = k_address + KV_BYTES;
        float scores[ROW_TILES][TOKENS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) {
            uint32_t a[ROW_TILES][4];
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
                load_matrices(a[m], q_address + swizzled<HEAD_DIM>(first_row + m * 16 + (lane & 15), d * 2 + (lane >> 4)));
#pragma unroll
            for (int n = 0; n < TOKENS / 16; n++) {
                uint32_t b[4];
                load_matrices(b, k_address + swizzled<HEAD_DIM>(n * 16 + (lane & 7) + ((lane >> 4) << 3), d * 2 + ((lane >> 3) & 1)));
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    mma(scores[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma(scores[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
        const int first_token = step * TOKENS;
        // Every row sees all of these tokens: no mask.
        const bool whole = first_token + TOKENS <= first_position + 1 &&
            (scoring.window == 0 || first_token > end - 1 - scoring.window);
        const float factor = scoring.scale * LOG2_E;
        uint32_t weights[ROW_TILES][TOKENS / 8][2];
        float correction[ROW_TILES][2];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            // Each condition once, not for each score: most steps have neither a cap nor a mask.
            if (scoring.soft_cap > 0.0f) {
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        scores[m][n][k] = capped(scores[m][n][k] * scoring.scale, scoring.soft_cap) / scoring.scale;
            }
            if (!whole) {
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const int token = first_token + n * 8 + t * 2 + (k & 1);
                        const int position = first_position + first_row + m * 16 + g + (k >> 1) * 8;
                        const bool seen = token <= position && (scoring.window == 0 || token > position - scoring.window);
                        if (!seen) scores[m][n][k] = -INFINITY;
                    }
            }
            float step_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) step_max[k >> 1] = fmaxf(step_max[k >> 1], scores[m][n][k]);
            float base[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                step_max[r] = fmaxf(step_max[r], __shfl_xor_sync(0xffffffffu, step_max[r], 1));
                step_max[r] = fmaxf(step_max[r], __shfl_xor_sync(0xffffffffu, step_max[r], 2));
                const float larger = fmaxf(largest[m][r], step_max[r]);
                // A row may have seen nothing yet (window) or be beyond the sequence.
                base[r] = larger == -INFINITY ? 0.0f : larger * factor;
                correction[m][r] = power_of_two(largest[m][r] * factor - base[r]);
                largest[m][r] = larger;
                sums[m][r] *= correction[m][r];
            }
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) {
                float p[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    p[k] = power_of_two(fmaf(scores[m][n][k], factor, -base[k >> 1]));
                    sums[m][k >> 1] += p[k];
                }
                weights[m][n][0] = pack(p[0], p[1]);
                weights[m][n][1] = pack(p[2], p[3]);
            }
        }
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 8; d++)
#pragma unroll
                for (int k = 0; k < 4; k++) totals[m][d][k] *= correction[m][k >> 1];
#pragma unroll
        for (int n = 0; n < TOKENS / 16; n++)
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; d++) {
                uint32_t b[4];
                load_matrices_transposed(b, v_address + swizzled<HEAD_DIM>(n * 16 + (lane & 15), d * 2 + (lane >> 4)));
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    mma(totals[m][2 * d], weights[m][2 * n][0], weights[m][2 * n][1], weights[m][2 * n + 1][0], weights[m][2 * n + 1][1], b[0], b[1]);
                    mma(totals[m][2 * d + 1], weights[m][2 * n][0], weights[m][2 * n][1], weights[m][2 * n + 1][0], weights[m][2 * n + 1][1], b[2], b[3]);
                }
            }
        __syncthreads();
    }
    copy_wait<0>();
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = sums[m][r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const int row = first_row + m * 16 + g + r * 8;
            if (row >= rows) continue;
            const float inverse = 1.0f / sum;
            bf16 *to = out + (size_t(sequence.x + item.y + row) * heads + head) * HEAD_DIM + t * 2;
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 8; d++)
                *reinterpret_cast<uint32_t *>(to + d * 8) =
                    pack(totals[m][d][2 * r] * inverse, totals[m][d][2 * r + 1] * inverse);
        }
}

#define ATTENTION_PREFILL(HEAD_DIM, ROW_TILES, WARPS, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) attention_prefill_##HEAD_DIM(  \
        const bf16 *qkv, int row_len, const bf16 *pages, int kv_heads, int heads,                   \
        const int4 *sequences, const uint32_t *tables, const int2 *work,                            \
        const KvOfHead kv_of_head, Scoring scoring, bf16 *out) {                                    \
        attention<HEAD_DIM, ROW_TILES, WARPS>(qkv, row_len, pages, kv_heads, heads, sequences,      \
                                              tables, work, kv_of_head, scoring, out);              \
    }
// 128 rows a block. Shared memory: (128 + 4 * 64) * 2 * HEAD_DIM bytes.
ATTENTION_PREFILL(64, 2, 4, 2)
ATTENTION_PREFILL(128, 2, 4, 2)
ATTENTION_PREFILL(256, 1, 8, 1)
