// The next token of rows of logits, one block a row: the likeliest, its raw logprob, or the winner of
// the race described in shard/src/sampler/race.rs (the same numbers, so the same tokens).
#include "cut.cuh"

constexpr int THREADS = 1024;

struct Choice {
    float inverse_temperature; // 0: greedy
    float farthest;            // tokens at a larger distance from the best are out (min-p)
    uint64_t race;             // start of the row's random numbers
    uint32_t top_k;            // 0: all
    float top_p;               // 0: all; a share of what top-k keeps
};
// status: 0 fine, 1 a NaN, 2 an infinite logit, 3 nothing possible.
struct Chosen {
    uint32_t token;
    float logprob;
    uint32_t status;
    uint32_t unused;
};

struct Best {
    float value;
    uint32_t token;
};
__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}
struct Runner {
    double time;
    uint32_t token;
};
__device__ __forceinline__ Runner faster(Runner a, Runner b) {
    return b.time < a.time || (b.time == a.time && b.token < a.token) ? b : a;
}
__device__ __forceinline__ uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const float *logits, int width, uint32_t first_token, const Choice *choices, Chosen *chosen) {
    __shared__ Best bests[32];
    __shared__ Runner runners[32];
    __shared__ float scratch[33];
    __shared__ CutScratch cut_scratch;
    wait_for_inputs();
    let_next_start();
    const float *row = logits + size_t(blockIdx.x) * width;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Best best = {-INFINITY, 0xffffffffu};
    float sum = 0.0f; // of e^(logit - best.value)
    int nan = 0;
    each_logit<THREADS>(row, width, [&](int i, float logit) {
        nan |= isnan(logit);
        if (logit > best.value || best.token == 0xffffffffu) {
            sum = best.value == -INFINITY ? 0.0f : sum * __expf(best.value - logit);
            best = {logit, first_token + i};
        }
        if (logit > -INFINITY) sum += __expf(logit - best.value);
    });
    const Best own = best;
#pragma unroll
    for (int i = 16; i > 0; i >>= 1)
        best = better(best, {__shfl_xor_sync(0xffffffffu, best.value, i), __shfl_xor_sync(0xffffffffu, best.token, i)});
    if (lane == 0) bests[warp] = best;
    nan = __syncthreads_or(nan);
    best = bests[0];
    for (int i = 1; i < THREADS / 32; i++) best = better(best, bests[i]);
    const float scaled = own.value == -INFINITY ? 0.0f : sum * __expf(own.value - best.value);
    const float total = block_sum(scaled, scratch);
    Chosen result = {best.token, -logf(total), 0, 0};
    if (nan) result.status = 1;
    else if (best.value == INFINITY) result.status = 2;
    else if (best.value == -INFINITY) result.status = 3;
    const Choice choice = choices[blockIdx.x];
    if (result.status == 0 && choice.inverse_temperature > 0.0f) {
        const Row places = {row, width, first_token, best.value, choice.inverse_temperature};
        Place cut = Row::place(choice.farthest, 0xffffffffu);
        if (choice.top_k > 0) cut = min(cut, find_cut<THREADS>(places, {choice.top_k, 0.0f, 0}, choice.top_p > 0.0f, cut_scratch));
        if (choice.top_p > 0.0f) {
            const uint64_t kept = choice.top_k > 0 ? cut_scratch.mass : 0;
            cut = min(cut, find_cut<THREADS>(places, {0, choice.top_p, kept}, true, cut_scratch));
        }
        const float farthest = __uint_as_float(cut >> 32);
        constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15ull;
        Runner lead = {INFINITY, 0xffffffffu};
        each_logit<THREADS>(row, width, [&](int i, float logit) {
            const float distance = places.distance(logit);
            const uint32_t token = first_token + i;
            if (!(distance <= farthest) || Row::place(distance, token) > cut) return;
            const uint64_t hash = mix(choice.race + (uint64_t(token) + 1) * GOLDEN);
            const double v = (double(hash >> 12) + 0.5) * (1.0 / double(1ull << 52));
            // -ln(1 - v) >= v: most tokens are known to be too slow without an exact logarithm.
            if (logf(float(v)) + distance > lead.time + 1e-3) return;
            const double time = log(-log1p(-v)) + double(distance);
            lead = faster(lead, {time, token});
        });
#pragma unroll
        for (int i = 16; i > 0; i >>= 1)
            lead = faster(lead, {__shfl_xor_sync(0xffffffffu, lead.time, i), __shfl_xor_sync(0xffffffffu, lead.token, i)});
        if (lane == 0) runners[warp] = lead;
        __syncthreads();
        lead = runners[0];
        for (int i = 1; i < THREADS / 32; i++) lead = faster(lead, runners[i]);
        result.token = lead.token;
        result.logprob = row[lead.token - first_token] - best.value - logf(total);
    }
    if (threadIdx.x == 0) chosen[blockIdx.x] = result;
}
