// Top-k and top-p: where a row of logits is cut. The same numbers as in shard/src/sampler, so the same
// tokens: places (weight.rs), weights as `decay` of shard/kernels/src/exponential.rs computes them, and
// masses that are integers, which add up alike in every order.
#pragma once
#include "numeric.cuh"

// Bits of the distance from the best, then the token: unique, and smaller for a likelier token.
typedef uint64_t Place;
constexpr Place LAST_PLACE = ~Place(0);
// So few places are sorted instead of being searched further.
constexpr int FEW = 2048;
constexpr int PARTS = 8;

// Visits a block's share of a row: index and logit, several loads ahead.
template <int THREADS, typename Visit> __device__ __forceinline__ void each_logit(const float *logits, int width, Visit visit) {
    constexpr int AHEAD = 4;
    int i = threadIdx.x;
    for (; i + (AHEAD - 1) * THREADS < width; i += AHEAD * THREADS) {
        float values[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) values[k] = logits[i + k * THREADS];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) visit(i + k * THREADS, values[k]);
    }
    for (; i < width; i += THREADS) visit(i, logits[i]);
}

struct Row {
    const float *logits;
    int width;
    uint32_t first_token;
    float best, inverse_temperature;

    __device__ __forceinline__ float distance(float logit) const { return (best - logit) * inverse_temperature; }
    __device__ __forceinline__ static Place place(float distance, uint32_t token) {
        return Place(__float_as_uint(distance)) << 32 | token;
    }
};

// e^-distance, by the operations of `decay` in their order.
__device__ __forceinline__ float decay(float distance) {
    constexpr float ROUND = 12582912.0f, LOW = -87.3f;
    const float x = __fsub_rn(0.0f, distance), inside = fminf(88.0f, fmaxf(LOW, x));
    const float n = __fsub_rn(__fmaf_rn(inside, 1.44269504088896340736f, ROUND), ROUND);
    const float t = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.6933594f, inside));
    float p = 1.9875691e-4f;
    p = __fmaf_rn(p, t, 1.3981999e-3f);
    p = __fmaf_rn(p, t, 8.333452e-3f);
    p = __fmaf_rn(p, t, 4.1665796e-2f);
    p = __fmaf_rn(p, t, 1.6666665e-1f);
    p = __fmaf_rn(p, t, 0.5f);
    const float e = __fadd_rn(__fmaf_rn(p, __fmul_rn(t, t), t), 1.0f);
    return x < LOW ? 0.0f : __fmul_rn(e, __int_as_float((int(n) + 127) << 23));
}
// A weight in units of 2^-40.
__device__ __forceinline__ uint64_t mass(float distance) {
    return __double_as_longlong(__dadd_rn(double(decay(distance)), 4096.0)) - __double_as_longlong(4096.0);
}

// What a block's threads share while they search.
struct CutScratch {
    Place pivots[PARTS];
    unsigned long long masses[PARTS];
    uint32_t counts[PARTS];
    int found;
    // The places that are left, and the masses up to each.
    Place places[FEW];
    uint64_t sums[FEW];
    Place cut;
    uint64_t mass;
};

// A goal: so many tokens, or the share of a mass (0: that of the whole row).
struct Goal {
    uint32_t count; // 0: a share
    float share;
    uint64_t mass;

    __device__ __forceinline__ uint64_t of(uint64_t whole) const {
        if (count > 0) return count;
        const uint64_t given = mass > 0 ? mass : whole;
        const uint64_t wanted = uint64_t(ceil(double(share) * double(given)));
        return min(max(wanted, uint64_t(1)), max(given, uint64_t(1)));
    }
};

// Counts, and masses where they are wanted, of the places from `low` to each pivot, in scratch.
template <int THREADS> __device__ void measure(const Row &row, Place low, bool weighed, CutScratch &scratch) {
    uint32_t counts[PARTS] = {};
    uint64_t masses[PARTS] = {};
    const Place high = scratch.pivots[PARTS - 1];
    if (threadIdx.x < PARTS) scratch.counts[threadIdx.x] = 0, scratch.masses[threadIdx.x] = 0;
    __syncthreads();
    each_logit<THREADS>(row.logits, row.width, [&](int i, float logit) {
        const float distance = row.distance(logit);
        const Place place = Row::place(distance, row.first_token + i);
        if (place < low || place > high) return;
        const uint64_t weight = weighed ? mass(distance) : 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            if (place <= scratch.pivots[part]) counts[part]++, masses[part] += weight;
    });
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const uint32_t count = __reduce_add_sync(0xffffffffu, counts[part]);
        uint64_t sum = masses[part];
#pragma unroll
        for (int i = 16; i > 0; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
        if ((threadIdx.x & 31) == 0 && count > 0) {
            atomicAdd(&scratch.counts[part], count);
            atomicAdd(&scratch.masses[part], static_cast<unsigned long long>(sum));
        }
    }
    __syncthreads();
}

// Puts the places from `low` to `high` in order, and adds up their masses.
template <int THREADS> __device__ void sort_places(const Row &row, Place low, Place high, CutScratch &scratch) {
    for (int i = threadIdx.x; i < FEW; i += THREADS) scratch.places[i] = LAST_PLACE;
    if (threadIdx.x == 0) scratch.found = 0;
    __syncthreads();
    each_logit<THREADS>(row.logits, row.width, [&](int i, float logit) {
        const Place place = Row::place(row.distance(logit), row.first_token + i);
        if (place >= low && place <= high) scratch.places[atomicAdd(&scratch.found, 1)] = place;
    });
    __syncthreads();
    int size = 2;
    while (size < scratch.found) size *= 2;
    // Bitonic (Batcher 1968).
    for (int run = 2; run <= size; run *= 2)
        for (int stride = run / 2; stride > 0; stride /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int a = 2 * i - (i & (stride - 1)), b = a + stride;
                const Place first = scratch.places[a], second = scratch.places[b];
                if ((first > second) == ((a & run) == 0)) scratch.places[a] = second, scratch.places[b] = first;
            }
            __syncthreads();
        }
    for (int i = threadIdx.x; i < size; i += THREADS)
        scratch.sums[i] = i < scratch.found ? mass(__uint_as_float(scratch.places[i] >> 32)) : 0;
    __syncthreads();
    for (int stride = 1; stride < size; stride *= 2) {
        uint64_t before[FEW / THREADS];
#pragma unroll
        for (int k = 0; k < FEW / THREADS; k++) {
            const int i = threadIdx.x + k * THREADS;
            before[k] = i >= stride && i < size ? scratch.sums[i - stride] : 0;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < FEW / THREADS; k++)
            if (threadIdx.x + k * THREADS < size) scratch.sums[threadIdx.x + k * THREADS] += before[k];
        __syncthreads();
    }
}

// The last place that is kept, so that the goal is just reached, and where `weighed` in `scratch.mass`
// the mass up to it; LAST_PLACE if there are no more tokens than asked for. By all threads of the block.
template <int THREADS>
__device__ Place find_cut(const Row &row, const Goal &goal, bool weighed, CutScratch &scratch) {
    const bool by_count = goal.count > 0;
    Place low = 0, high = LAST_PLACE;
    uint64_t before = 0, rest = 0;
    for (int pass = 0;; pass++) {
        __syncthreads();
        if (threadIdx.x < PARTS) {
            // At first by distance: where the cut of most rows lies.
            const float distance = exp2f(float(threadIdx.x) - 1.0f);
            const Place step = (high - low) / PARTS;
            const Place end = pass == 0 ? Row::place(distance, 0xffffffffu) : low + step * (threadIdx.x + 1);
            scratch.pivots[threadIdx.x] = threadIdx.x == PARTS - 1 ? high : end;
        }
        __syncthreads();
        measure<THREADS>(row, low, weighed, scratch);
        if (pass == 0) rest = goal.of(scratch.masses[PARTS - 1]);
        int part = 0;
        while (part < PARTS && (by_count ? scratch.counts[part] : scratch.masses[part]) < rest) part++;
        if (part == PARTS) {
            if (threadIdx.x == 0) scratch.mass = scratch.masses[PARTS - 1];
            __syncthreads();
            return LAST_PLACE;
        }
        const uint32_t count_before = part > 0 ? scratch.counts[part - 1] : 0;
        const uint64_t mass_before = part > 0 ? scratch.masses[part - 1] : 0;
        rest -= by_count ? count_before : mass_before;
        before += mass_before;
        low = part > 0 ? scratch.pivots[part - 1] + 1 : low;
        high = scratch.pivots[part];
        if (scratch.counts[part] - count_before <= FEW) break;
    }
    __syncthreads();
    sort_places<THREADS>(row, low, high, scratch);
    for (int i = threadIdx.x; i < scratch.found; i += THREADS) {
        const uint64_t reached = by_count ? i + 1 : scratch.sums[i];
        const uint64_t earlier = i == 0 ? 0 : by_count ? i : scratch.sums[i - 1];
        if (reached >= rest && earlier < rest) {
            scratch.cut = scratch.places[i];
            scratch.mass = before + scratch.sums[i];
        }
    }
    __syncthreads();
    return scratch.cut;
}
