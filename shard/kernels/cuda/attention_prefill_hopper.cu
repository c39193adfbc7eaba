// The prefill attention of Hopper (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608). One warp has
// pages copied by the copy engine; two warpgroups compute, in turns: while the tensor cores work for
// one, the other makes weights of its scores. A block takes items, tiles of one query head, until
// there are none left: the copies of the next item run ahead.
#include "attention.cuh"
#include "bulk.cuh"

constexpr int GROUP = 128, THREADS = 3 * GROUP;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma.cuh"

constexpr int TILE = 128;   // rows an item: 64 a warpgroup
constexpr int TOKENS = 128; // keys a step
constexpr int PAGES = TOKENS / BLOCK_TOKENS;
constexpr int STAGES = 2;
// Named barriers: one of each group, and whose turn it is.
constexpr int GROUP_BARRIER = 1, TURN_BARRIER = 3;

struct Steps {
    const int4 *sequences;
    const uint32_t *tables;
    const int2 *work;
    int items, heads, window;
};

struct Item {
    int first_row, rows, head; // rows of the step; at most TILE
    int first_position, end;   // of the tokens
    int first_step, end_step;
    const uint32_t *table;
};

// The item of a block's round. Items get shorter: every other round goes backwards, so that all blocks
// have about as much to do.
__device__ __forceinline__ bool take(const Steps &steps, int round, Item &item) {
    const int place = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x, index = round * gridDim.x + place;
    if (index >= steps.items) return false;
    const int2 work = steps.work[index / steps.heads];
    const int4 sequence = steps.sequences[work.x];
    item.first_row = sequence.x + work.y;
    item.rows = min(TILE, sequence.y - work.y);
    item.head = index % steps.heads;
    item.first_position = sequence.z - sequence.y + work.y;
    item.end = item.first_position + item.rows;
    item.first_step = steps.window > 0 ? max(0, item.first_position - steps.window + 1) / TOKENS : 0;
    item.end_step = (item.end + TOKENS - 1) / TOKENS;
    item.table = steps.tables + sequence.w;
    return true;
}

// Stages of keys or values in shared memory, filled and emptied in turn.
struct Ring {
    uint32_t operands, stage_bytes, full, empty;

    __device__ __forceinline__ uint32_t operand(int turn) const { return operands + (turn % STAGES) * stage_bytes; }
    __device__ __forceinline__ uint32_t full_at(int turn) const { return full + (turn % STAGES) * 8; }
    __device__ __forceinline__ uint32_t empty_at(int turn) const { return empty + (turn % STAGES) * 8; }
    __device__ __forceinline__ void wait_full(int turn) const { barrier_wait(full_at(turn), turn / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(int turn) const { barrier_wait(empty_at(turn), turn / STAGES & 1 ^ 1); }
    __device__ __forceinline__ void release(int turn) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty_at(turn));
    }
};

// One warp: a lane copies the keys or values of one page, 64 of their dimensions.
template <int HEAD_DIM>
__device__ void copy_pages(const Steps &steps, const TensorMap &pages, int kv_heads, const KvOfHead &kv_of_head,
                           const Ring &keys, const Ring &values) {
    constexpr int PANELS = HEAD_DIM / 64;
    const int lane = threadIdx.x & 31, page = lane / PANELS, panel = lane % PANELS;
    int turn = 0;
    Item item;
    for (int round = 0; take(steps, round, item); round++) {
        const int kv_head = kv_of_head.kv_head[item.head];
        auto copy = [&](const Ring &ring, int part, int step, int turn) {
            const int count = min(PAGES, (item.end - step * TOKENS + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
            const uint32_t to = ring.operand(turn) + panel * TOKENS * 128 + page * BLOCK_TOKENS * 128;
            ring.wait_empty(turn);
            if (lane == 0) barrier_expect(ring.full_at(turn), count * BLOCK_TOKENS * HEAD_DIM * 2);
            __syncwarp();
            if (page >= count) return;
            const int block = item.table[step * PAGES + page];
            copy_box(to, pages, panel * 64, ((block * kv_heads + kv_head) * 2 + part) * BLOCK_TOKENS, ring.full_at(turn));
        };
        copy(keys, 0, item.first_step, turn);
        for (int step = item.first_step; step < item.end_step; step++, turn++) {
            if (step + 1 < item.end_step) copy(keys, 0, step + 1, turn + 1);
            copy(values, 1, step, turn);
        }
    }
}

template <int HEAD_DIM>
__device__ void attend(const Steps &steps, const bf16 *qkv, int row_len, Scoring scoring, uint32_t q_address,
                       const Ring &keys, const Ring &values, bf16 *out) {
    constexpr int PANEL_BYTES = TOKENS * 128, PIECES = HEAD_DIM / 8;
    const int group = threadIdx.x / GROUP, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3, first_row = group * 64 + warp * 16 + g;
    float scores[TOKENS / 8][4], totals[HEAD_DIM / 8][4];
    uint32_t weights[TOKENS / 16][4];
    float largest[2], sums[2], correction[2];
    Item item;
    if (!take(steps, 0, item)) return;

    // Each group copies its own rows.
    auto copy_queries = [&](const Item &item) {
        const bf16 *q = qkv + size_t(item.first_row) * row_len + item.head * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < 64 * PIECES / GROUP; i++) {
            const int index = i * GROUP + threadIdx.x % GROUP, row = group * 64 + index / PIECES, piece = index % PIECES;
            copy16(q_address + (piece >> 3) * PANEL_BYTES + panel_place(row, piece & 7),
                   q + size_t(min(row, item.rows - 1)) * row_len + piece * 8, row < item.rows);
        }
        copy_commit();
    };
    auto score = [&](int turn) {
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) {
            const uint32_t offset = (d >> 2) * PANEL_BYTES + (d & 3) * 32;
            wgmma_shared_128(scores, operand(q_address + group * 64 * 128 + offset, 16), operand(keys.operand(turn) + offset, 16), d > 0);
        }
        wgmma_commit();
    };
    auto weigh = [&](int turn) {
#pragma unroll
        for (int n = 0; n < TOKENS / 16; n++) {
            const uint64_t v = operand(values.operand(turn) + n * 16 * 128, PANEL_BYTES);
            if constexpr (HEAD_DIM == 128) wgmma_registers_128(totals, weights[n], v);
            else wgmma_registers_64(totals, weights[n], v);
        }
        wgmma_commit();
    };
    // Scores become weights, in place.
    auto soften = [&](int step) {
        const int first_token = step * TOKENS;
        const bool whole = first_token + TOKENS <= item.first_position + 1 &&
            (scoring.window == 0 || first_token > item.end - 1 - scoring.window);
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
                    const int position = item.first_position + first_row + (k >> 1) * 8;
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
    // What lies in a page behind the sequence's end may be no numbers, and no weight of 0 hides that.
    auto clear_behind_end = [&](int turn) {
        for (int i = (item.end % TOKENS) * PIECES + threadIdx.x % GROUP; i < TOKENS * PIECES; i += GROUP) {
            const uint32_t at = values.operand(turn) + (i % PIECES >> 3) * PANEL_BYTES + panel_place(i / PIECES, i & 7);
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        }
        publish_shared();
        named_sync(GROUP_BARRIER + group, GROUP);
    };
    auto store = [&]() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = sums[r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const int row = first_row + r * 8;
            if (row >= item.rows) continue;
            const float inverse = 1.0f / sum;
            bf16 *to = out + (size_t(item.first_row + row) * steps.heads + item.head) * HEAD_DIM + t * 2;
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 8; d++)
                *reinterpret_cast<uint32_t *>(to + d * 8) = pack(totals[d][2 * r] * inverse, totals[d][2 * r + 1] * inverse);
        }
    };

    copy_queries(item);
    if (group == 1) named_arrive(TURN_BARRIER, 2 * GROUP);
    int turn = 0;
    for (int round = 1;; round++) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) totals[i][k] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[r] = -INFINITY;
            sums[r] = 0.0f;
        }
        copy_wait<0>();
        publish_shared();
        named_sync(GROUP_BARRIER + group, GROUP);
        keys.wait_full(turn);
        wgmma_fence();
        score(turn);
        wgmma_wait<0>();
        keys.release(turn);
        soften(item.first_step);
        pack_weights();
        for (int step = item.first_step + 1; step < item.end_step; step++, turn++) {
            keys.wait_full(turn + 1);
            named_sync(TURN_BARRIER + group, 2 * GROUP);
            wgmma_fence();
            score(turn + 1);
            values.wait_full(turn);
            weigh(turn);
            named_arrive(TURN_BARRIER + (group ^ 1), 2 * GROUP);
            wgmma_wait<1>();
            keys.release(turn + 1);
            soften(step);
            wgmma_wait<0>();
            values.release(turn);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
                for (int k = 0; k < 4; k++) totals[i][k] *= correction[k >> 1];
            pack_weights();
        }
        // The queries have been read: by all warps, once they meet here.
        named_sync(GROUP_BARRIER + group, GROUP);
        Item next;
        const bool more = take(steps, round, next);
        if (more) copy_queries(next);
        values.wait_full(turn);
        if (item.end % TOKENS != 0) clear_behind_end(turn);
        wgmma_fence();
        weigh(turn);
        wgmma_wait<0>();
        values.release(turn++);
        store();
        if (!more) return;
        item = next;
    }
}

template <int HEAD_DIM>
__device__ void attention(const Steps &steps, const bf16 *qkv, int row_len, const TensorMap &pages, int kv_heads,
                          const KvOfHead &kv_of_head, Scoring scoring, bf16 *out) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int OPERAND_BYTES = TOKENS * HEAD_DIM * 2;
    const uint32_t q_address = shared_address(shared), barriers = q_address + 5 * OPERAND_BYTES;
    const Ring keys = {q_address + OPERAND_BYTES, OPERAND_BYTES, barriers, barriers + 8 * STAGES};
    const Ring values = {q_address + 3 * OPERAND_BYTES, OPERAND_BYTES, barriers + 16 * STAGES, barriers + 24 * STAGES};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++)
            for (const Ring *ring : {&keys, &values}) {
                barrier_init(ring->full_at(stage), 1);
                barrier_init(ring->empty_at(stage), 2 * GROUP / 32);
            }
        publish_shared();
    }
    __syncthreads();
    wait_for_inputs();
    let_next_start();
    if (threadIdx.x >= 2 * GROUP) {
        give_registers<24>();
        if (threadIdx.x < 2 * GROUP + 32) copy_pages<HEAD_DIM>(steps, pages, kv_heads, kv_of_head, keys, values);
    } else {
        take_registers<240>();
        attend<HEAD_DIM>(steps, qkv, row_len, scoring, q_address, keys, values, out);
    }
}
#define BODY(HEAD_DIM)                                                                              \
    attention<HEAD_DIM>({sequences, tables, work, items, heads, scoring.window}, qkv, row_len,      \
                        pages, kv_heads, kv_of_head, scoring, out)
#else
#define BODY(HEAD_DIM)
#endif

// `items`: work items times heads. `pages`: the KV pages as rows of HEAD_DIM, in boxes of 16 rows of 64.
#define ATTENTION_PREFILL(HEAD_DIM)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_hopper_##HEAD_DIM(   \
        const bf16 *qkv, int row_len, const __grid_constant__ TensorMap pages, int kv_heads,        \
        int heads, const int4 *sequences, const uint32_t *tables, const int2 *work, int items,      \
        const __grid_constant__ KvOfHead kv_of_head, Scoring scoring, bf16 *out) {                  \
        BODY(HEAD_DIM);                                                                             \
    }
// Shared memory: 5 * 256 * HEAD_DIM + 64 bytes, aligned to 1024.
ATTENTION_PREFILL(64)
ATTENTION_PREFILL(128)
