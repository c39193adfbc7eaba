//! What sampling costs on one rank: `cargo run --release -p trireme-shard --example sample_cost`

use std::time::Instant;

use trireme_collectives::{CollectiveError, local};
use trireme_kernels::Team;
use trireme_shard::sampler::{Constraint, SampleRow, Sampling, sample};

/// Vocabulary of SmolLM2.
const VOCAB: usize = 49_152;
const CALLS: usize = 100;

/// About normal logits, as wide as a model's.
fn logits(rows: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..rows * VOCAB).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 4.0 - 12.0).collect()
}

#[allow(clippy::print_stdout)]
fn main() -> Result<(), CollectiveError> {
    let mut world = local::worlds(1, 1).remove(0);
    let hot = Sampling { temperature: Some(0.8), ..Sampling::default() };
    let cases = [
        ("greedy", Sampling::default()),
        ("greedy, logprobs", Sampling { logprobs: true, top_logprobs: 5, ..Sampling::default() }),
        ("temperature", hot.clone()),
        ("top_k 50", Sampling { top_k: Some(50), ..hot.clone() }),
        ("top_p 0.95", Sampling { top_p: Some(0.95), ..hot.clone() }),
        ("min_p 0.05", Sampling { min_p: Some(0.05), ..hot.clone() }),
        ("top_k 50, top_p 0.95", Sampling { top_k: Some(50), top_p: Some(0.95), ..hot }),
    ];
    let tokens: Vec<u32> = (0..200).collect();
    for (rows, threads) in [(1, 1), (16, 1), (16, 2)] {
        let team = Team::new(threads);
        let original = logits(rows);
        let mut scratch = original.clone();
        for (name, sampling) in &cases {
            let constraint = Constraint::Free;
            let prompt_len = 100;
            let row = |sequence| SampleRow {
                sequence,
                sampling,
                tokens: &tokens,
                prompt_len,
                constraint,
            };
            let rows: Vec<SampleRow<'_>> = (0..rows as u64).map(row).collect();
            let mut times = Vec::new();
            for _ in 0..CALLS {
                scratch.copy_from_slice(&original);
                let start = Instant::now();
                let sampled =
                    sample(&rows, &mut scratch, 0..VOCAB as u32, &mut *world.tensor, &team)?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
                std::hint::black_box(sampled);
            }
            times.sort_by(f64::total_cmp);
            println!(
                "{:>2} rows, {threads} threads, {name:<21} median {:>7.0} us, best {:>7.0} us",
                rows.len(),
                times[CALLS / 2],
                times[0]
            );
        }
    }
    Ok(())
}
