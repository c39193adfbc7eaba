//! How long an all-reduce takes between threads, back to back, for the vectors of a small model:
//! `cargo run --release -p trireme-collectives --example all_reduce_latency -- [ranks]`

use std::time::Instant;

use trireme_collectives::{CollectiveError, World, local};

/// Hidden size of SmolLM2-135M.
const HIDDEN: usize = 576;

fn measure(world: &mut World, floats: usize, calls: u32) -> Result<Vec<f64>, CollectiveError> {
    let mut data = vec![0.0f32; floats];
    world.tensor.barrier()?;
    (0..calls)
        .map(|_| {
            let start = Instant::now();
            world.tensor.all_reduce_sum(&mut data)?;
            Ok(start.elapsed().as_secs_f64() * 1e6)
        })
        .collect()
}

#[allow(clippy::print_stdout)]
fn main() -> Result<(), CollectiveError> {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    for (rows, calls) in [(1, 20_000), (16, 10_000), (64, 4_000), (512, 1_000)] {
        let mut worlds = local::worlds(ranks, 1);
        let mut times = std::thread::scope(|scope| {
            let mut first = worlds.remove(0);
            for mut world in worlds {
                scope.spawn(move || measure(&mut world, rows * HIDDEN, calls).map(|_| ()));
            }
            measure(&mut first, rows * HIDDEN, calls)
        })?;
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times[(times.len() as f64 * part) as usize];
        println!(
            "{ranks} ranks, {rows:>3} x {HIDDEN} floats: median {:>7.1} us, p10 {:.1}, p90 {:.1}, p99 {:.1}",
            at(0.5),
            at(0.1),
            at(0.9),
            at(0.99)
        );
    }
    Ok(())
}
