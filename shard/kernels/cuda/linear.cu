// out = x * wT + bias for few rows of x: bound by the reading of w, which is read once.
//
// A warp takes 16 (times TILES) outputs and every eighth stretch of 64 inputs. Weights are the
// 16-row operand of m16n8k16, rows of x the 8-column one. The order of the inputs within a product
// is free as long as both operands agree, so each lane takes 8 neighbouring inputs (16 bytes) of
// one row of w: what a lane copies is what it multiplies, and its copies run through a queue of its
// own in shared memory, without a barrier. Weights do not depend on earlier kernels: the queue is
// filled before `wait_for_inputs`.
#include "numeric.cuh"

constexpr int WARPS = 8;

// TILES: tiles of 16 outputs a block; COLUMNS: tiles of 8 rows of x; STAGES: depth of the queue, in
// stretches of 32 inputs. GATED: w is [gate | up] (each `outputs` rows), out = silu(gate) * up.
template <int TILES, int COLUMNS, int STAGES, bool GATED, typename Out>
__device__ void linear(const bf16 *w, const bf16 *x, const float *bias, Out *out, int rows, int outputs,
                       int inputs) {
    extern __shared__ __align__(128) uint4 queue[];
    constexpr int SLOT = 2 * TILES + COLUMNS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint4 *mine = queue + warp * STAGES * SLOT * 32 + lane;
    const uint32_t mine_address = shared_address(mine);
    const bf16 *w_rows[2 * TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int tile = blockIdx.x * TILES + i;
        int low, high;
        if (GATED) {
            low = min(tile * 8 + g, outputs - 1);
            high = outputs + low;
        } else {
            low = min(tile * 16 + g, outputs - 1);
            high = min(tile * 16 + g + 8, outputs - 1);
        }
        w_rows[2 * i] = w + size_t(low) * inputs + t * 8;
        w_rows[2 * i + 1] = w + size_t(high) * inputs + t * 8;
    }
    const bf16 *x_rows[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) x_rows[i] = x + size_t(min(i * 8 + g, rows - 1)) * inputs + t * 8;
    const int chunks = inputs / 64;
    const int steps = warp < chunks ? 2 * ((chunks - warp + WARPS - 1) / WARPS) : 0;
    auto input = [&](int step) { return ((step >> 1) * WARPS + warp) * 64 + (step & 1) * 32; };
    auto slot = [&](int step, int i) { return mine_address + ((step % STAGES) * SLOT + i) * 512; };
    auto copy_w = [&](int step) {
        if (step < steps) {
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) copy16(slot(step, i), w_rows[i] + input(step), true);
        }
    };
    auto copy_x = [&](int step) {
        if (step < steps) {
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                copy16(slot(step, 2 * TILES + i), x_rows[i] + input(step), i * 8 + g < rows);
        }
    };

#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) copy_w(step);
    wait_for_inputs();
    let_next_start();
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        copy_x(step);
        copy_commit();
    }
    float sums[TILES][COLUMNS][4] = {};
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        const uint4 *stage = mine + (step % STAGES) * SLOT * 32;
        uint4 a[2 * TILES], b[COLUMNS];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) a[i] = stage[i * 32];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) b[i] = stage[(2 * TILES + i) * 32];
        copy_w(step + STAGES - 1);
        copy_x(step + STAGES - 1);
        copy_commit();
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const uint4 low = a[2 * i], high = a[2 * i + 1];
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                mma(sums[i][j], low.x, high.x, low.y, high.y, b[j].x, b[j].y);
                mma(sums[i][j], low.z, high.z, low.w, high.w, b[j].z, b[j].w);
            }
        }
    }
    copy_wait<0>();
    __syncthreads();

    // The warps' sums meet in shared memory: [warp][x row][16 * TILES outputs].
    constexpr int OUTPUTS = 16 * TILES, SUMS = COLUMNS * 8 * OUTPUTS;
    float *shared = reinterpret_cast<float *>(queue);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int column = j * 8 + t * 2 + (k & 1), output = i * 16 + g + (k >> 1) * 8;
                shared[warp * SUMS + column * OUTPUTS + output] = sums[i][j][k];
            }
    __syncthreads();
    auto total = [&](int column, int output) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += shared[i * SUMS + column * OUTPUTS + output];
        return sum;
    };
    constexpr int KEPT = GATED ? OUTPUTS / 2 : OUTPUTS;
    for (int i = threadIdx.x; i < rows * KEPT; i += blockDim.x) {
        const int column = i / KEPT, kept = i % KEPT, output = blockIdx.x * KEPT + kept;
        if (output >= outputs) continue;
        float value;
        if (GATED) {
            const int gate_at = (kept >> 3) * 16 + (kept & 7);
            const float gate = total(column, gate_at), up = total(column, gate_at + 8);
            value = gate / (1.0f + __expf(-gate)) * up;
        } else {
            value = total(column, kept) + (bias ? bias[output] : 0.0f);
        }
        out[size_t(column) * outputs + output] = narrow<Out>(value);
    }
}

// Names: linear_[tiles]_[columns]_[stages]. Shared memory: 8 warps * STAGES * (2 * TILES + COLUMNS) *
// 512 bytes, for BLOCKS blocks on a multiprocessor.
#define LINEAR(TILES, COLUMNS, STAGES, BLOCKS)                                                      \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                       \
        linear_##TILES##_##COLUMNS##_##STAGES(const bf16 *w, const bf16 *x, const float *bias,      \
                                              bf16 *out, int rows, int outputs, int inputs) {       \
        linear<TILES, COLUMNS, STAGES, false, bf16>(w, x, bias, out, rows, outputs, inputs);        \
    }                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                       \
        linear_f32_##TILES##_##COLUMNS##_##STAGES(const bf16 *w, const bf16 *x, const float *bias,  \
                                                  float *out, int rows, int outputs, int inputs) {  \
        linear<TILES, COLUMNS, STAGES, false, float>(w, x, bias, out, rows, outputs, inputs);       \
    }                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                       \
        linear_gated_##TILES##_##COLUMNS##_##STAGES(const bf16 *w, const bf16 *x,                   \
                                                    const float *bias, bf16 *out, int rows,         \
                                                    int outputs, int inputs) {                      \
        linear<TILES, COLUMNS, STAGES, true, bf16>(w, x, bias, out, rows, outputs, inputs);         \
    }
LINEAR(1, 1, 8, 2)
LINEAR(1, 1, 5, 3)
LINEAR(1, 2, 6, 2)
LINEAR(1, 4, 8, 1)
LINEAR(2, 1, 5, 2)
LINEAR(2, 2, 8, 1)
LINEAR(2, 4, 6, 1)
