// The prefill attention of Hopper: as attention_prefill.cu, with the products of a warpgroup. While the
// tensor cores weigh the values of one step, scores of the next are made into weights (FlashAttention-3,
// Shah et al. 2024, arXiv:2407.08608).
#include "attention.cuh"

constexpr int THREADS = 256;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma.cuh"

constexpr int TILE = 128;   // rows a block: 64 a warpgroup
constexpr int TOKENS = 128; // keys a step

template <int HEAD_DIM>
__device__ void attention(const bf16 *qkv, int row_len, const bf16 *pages, int kv_heads, int heads,
                          const int4 *sequences, const uint32_t *tables, const int2 *work,
                          const KvOfHead &kv_of_head, Scoring scoring, bf16 *out) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int PANELS = HEAD_DIM / 64, PANEL_BYTES = TOKENS * 128;
    constexpr int OPERAND_BYTES = PANELS * PANEL_BYTES, PIECES = HEAD_DIM / 8;
    wait_for_inputs();
    let_next_start();
    const int2 item = work[blockIdx.x];
    const int4 sequence = sequences[item.x];
    const int head = blockIdx.y, kv_head = kv_of_head.kv_head[head];
    const int rows = min(TILE, sequence.y - item.y);
    const int first_position = sequence.z - sequence.y + item.y, end = first_position + rows;
    const int oldest = scoring.window > 0 ? max(0, first_position - scoring.window + 1) : 0;
    const uint32_t *table = tables + sequence.w;
    const uint32_t q_address = shared_address(shared);
    auto k_address = [&](int step) { return q_address + OPERAND_BYTES * (1 + (step & 1)); };
    auto v_address = [&](int step) { return q_address + OPERAND_BYTES * (3 + (step & 1)); };
    const int group = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3;

    const bf16 *q = qkv + size_t(sequence.x + item.y) * row_len + head * HEAD_DIM;
    for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        copy16(q_address + (piece >> 3) * PANEL_BYTES + panel_place(row, piece & 7),
               q + size_t(min(row, rows - 1)) * row_len + piece * 8, row < rows);
    }
    // `part`: 0 for keys, 1 for values.
    auto copy = [&](int step, int part, uint32_t address) {
#pragma unroll
        for (int i = 0; i < TOKENS * PIECES / THREADS; i++) {
            const int index = i * THREADS + threadIdx.x, row = index / PIECES, piece = index % PIECES;
            const int token = step * TOKENS + row;
            const bool keep = token < end;
            const size_t block = table[keep ? token / BLOCK_TOKENS : 0];
            copy16(address + (piece >> 3) * PANEL_BYTES + panel_place(row, piece & 7),
                   pages + (((block * kv_heads + kv_head) * 2 + part) * BLOCK_TOKENS + token % BLOCK_TOKENS) * HEAD_DIM + piece * 8,
                   keep);
        }
    };

    float scores[TOKENS / 8][4], totals[HEAD_DIM / 8][4];
    uint32_t weights[TOKENS / 16][4];
    float largest[2] = {-INFINITY, -INFINITY}, sums[2] = {0.0f, 0.0f}, correction[2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) totals[i][k] = 0.0f;
    const uint32_t q_rows = q_address + group * 64 * 128;
    auto score = [&](int step) {
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) {
            const uint32_t offset = (d >> 2) * PANEL_BYTES + (d & 3) * 32;
            wgmma_shared_128(scores, operand(q_rows + offset, 16), operand(k_address(step) + offset, 16), d > 0);
        }
    };
    auto weigh = [&](int step) {
#pragma unroll
        for (int n = 0; n < TOKENS / 16; n++) {
            const uint64_t v = operand(v_address(step) + n * 16 * 128, PANEL_BYTES);
            if constexpr (HEAD_DIM == 128) wgmma_registers_128(totals, weights[n], v);
            else wgmma_registers_64(totals, weights[n], v);
        }
    };
    const int first_row = group * 64 + warp * 16 + g;
    // Scores become weights, in place.
    auto soften = [&](int step) {
        const int first_token = step * TOKENS;
        const bool whole = first_token + TOKENS <= first_position + 1 &&
            (scoring.window == 0 || first_token > end - 1 - scoring.window);
        const float factor = scoring.scale * LOG2_E;
        // Each condition once, not for each score: most steps have neither a cap nor a mask.
        if (scoring.soft_cap > 0.0f) {
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    scores[n][k] = capped(scores[n][k] * scoring.scale, scoring.soft_cap) / scoring.scale;
        }
        if (!whole) {
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int token = first_token + n * 8 + t * 2 + (k & 1);
                    const int position = first_position + first_row + (k >> 1) * 8;
                    const bool seen = token <= position && (scoring.window == 0 || token > position - scoring.window);
                    if (!seen) scores[n][k] = -INFINITY;
                }
        }
        float step_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) step_max[k >> 1] = fmaxf(step_max[k >> 1], scores[n][k]);
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            step_max[r] = fmaxf(step_max[r], __shfl_xor_sync(0xffffffffu, step_max[r], 1));
            step_max[r] = fmaxf(step_max[r], __shfl_xor_sync(0xffffffffu, step_max[r], 2));
            const float larger = fmaxf(largest[r], step_max[r]);
            base[r] = larger == -INFINITY ? 0.0f : larger * factor;
            correction[r] = power_of_two(largest[r] * factor - base[r]);
            largest[r] = larger;
            sums[r] *= correction[r];
        }
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                scores[n][k] = power_of_two(fmaf(scores[n][k], factor, -base[k >> 1]));
                sums[k >> 1] += scores[n][k];
            }
    };
    auto pack_weights = [&]() {
#pragma unroll
        for (int n = 0; n < TOKENS / 16; n++) {
            weights[n][0] = pack(scores[2 * n][0], scores[2 * n][1]);
            weights[n][1] = pack(scores[2 * n][2], scores[2 * n][3]);
            weights[n][2] = pack(scores[2 * n + 1][0], scores[2 * n + 1][1]);
            weights[n][3] = pack(scores[2 * n + 1][2], scores[2 * n + 1][3]);
        }
    };
    auto arrive = [&]() {
        copy_wait<0>();
        publish_shared();
        __syncthreads();
    };

    const int first_step = oldest / TOKENS, end_step = (end + TOKENS - 1) / TOKENS;
    copy(first_step, 0, k_address(first_step));
    copy_commit();
    arrive();
    if (first_step + 1 < end_step) copy(first_step + 1, 0, k_address(first_step + 1));
    copy(first_step, 1, v_address(first_step));
    copy_commit();
    wgmma_fence();
    score(first_step);
    wgmma_commit();
    wgmma_wait<0>();
    soften(first_step);
    pack_weights();
    for (int step = first_step + 1; step < end_step; step++) {
        arrive();
        wgmma_fence();
        score(step);
        wgmma_commit();
        weigh(step - 1);
        wgmma_commit();
        if (step + 1 < end_step) copy(step + 1, 0, k_address(step + 1));
        copy(step, 1, v_address(step));
        copy_commit();
        wgmma_wait<1>();
        soften(step);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) totals[i][k] *= correction[k >> 1];
        pack_weights();
    }
    arrive();
    wgmma_fence();
    weigh(end_step - 1);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = sums[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = first_row + r * 8;
        if (row >= rows) continue;
        const float inverse = 1.0f / sum;
        bf16 *to = out + (size_t(sequence.x + item.y + row) * heads + head) * HEAD_DIM + t * 2;
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 8; d++)
            *reinterpret_cast<uint32_t *>(to + d * 8) = pack(totals[d][2 * r] * inverse, totals[d][2 * r + 1] * inverse);
    }
}
#define BODY(HEAD_DIM)                                                                              \
    attention<HEAD_DIM>(qkv, row_len, pages, kv_heads, heads, sequences, tables, work, kv_of_head,  \
                        scoring, out)
#else
#define BODY(HEAD_DIM)
#endif

#define ATTENTION_PREFILL(HEAD_DIM)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_hopper_##HEAD_DIM(   \
        const bf16 *qkv, int row_len, const bf16 *pages, int kv_heads, int heads,                   \
        const int4 *sequences, const uint32_t *tables, const int2 *work,                            \
        const KvOfHead kv_of_head, Scoring scoring, bf16 *out) {                                    \
        BODY(HEAD_DIM);                                                                             \
    }
// Shared memory: 5 * 256 * HEAD_DIM bytes, aligned to 1024.
ATTENTION_PREFILL(64)
ATTENTION_PREFILL(128)
