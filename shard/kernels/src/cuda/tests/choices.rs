//! The choice of tokens against a sort of the whole vocabulary.

use super::*;
use crate::decay;

#[test]
fn the_likeliest() {
    let mut gpu = Gpu::open();
    let (rows, width) = (5, 50_001);
    let mut logits = gpu.values(rows * width);
    logits.iter_mut().for_each(|logit| *logit *= 8.0);
    logits[2 * width + 77] = f32::NAN;
    logits[3 * width..4 * width].fill(f32::NEG_INFINITY);
    logits[4 * width + 9] = 30.0;
    logits[4 * width + 5] = 30.0;
    let mut buffers = SampleBuffers::new(gpu.stream.context(), rows).expect("room");
    let tensor = gpu.tensor(&logits, width, Element::F32);
    let greedy = [Choice::default(); 5];
    buffers.queue(&gpu.stream, &tensor, 100, &greedy).expect("choose");
    let chosen = buffers.take().expect("choose").to_vec();
    for row in [0, 1, 4] {
        let of_row = &logits[row * width..][..width];
        let best = of_row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let token = of_row.iter().position(|&logit| logit == best).expect("one") as u32 + 100;
        let sum: f64 = of_row.iter().map(|&logit| f64::from(logit - best).exp()).sum();
        assert_eq!((chosen[row].status, chosen[row].token), (0, token), "row {row}");
        near(&[chosen[row].logprob], &[-sum.ln()], F32, "logprob");
    }
    assert_eq!([chosen[2].status, chosen[3].status], [1, 3]);
}

/// A weight in units of 2⁻⁴⁰, as in the CPU's sampler.
fn mass(distance: f32) -> u64 {
    let mut weight = [0.0];
    decay(&[distance], &mut weight);
    (f64::from(weight[0]) * (1u64 << 40) as f64).round_ties_even() as u64
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What a choice keeps of a row, likeliest first: distances and tokens.
fn kept(row: &[f32], first: u32, choice: &Choice) -> Vec<(f32, u32)> {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let distances = row.iter().map(|logit| (best - logit) * choice.inverse_temperature);
    let mut places: Vec<(f32, u32)> = distances.zip(first..).collect();
    places.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    if choice.top_k > 0 {
        places.truncate(choice.top_k as usize);
    }
    if choice.top_p > 0.0 {
        let whole: u64 = places.iter().map(|place| mass(place.0)).sum();
        let wanted = (f64::from(choice.top_p) * whole as f64).ceil().max(1.0) as u64;
        let mut sum = 0;
        let reached = places.iter().position(|place| {
            sum += mass(place.0);
            sum >= wanted
        });
        places.truncate(reached.map_or(places.len(), |index| index + 1));
    }
    places.retain(|place| place.0 <= choice.farthest);
    places
}

fn winner(places: &[(f32, u32)], race: u64) -> u32 {
    let time = |&(distance, token): &(f32, u32)| {
        let counter = (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let v = ((mix(race.wrapping_add(counter)) >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
        ((-(-v).ln_1p()).ln() + f64::from(distance), token)
    };
    let times = places.iter().map(time);
    times.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map_or(u32::MAX, |best| best.1)
}

/// Rows of logits: peaked, spread, coarse (many are equal), all equal, mostly impossible.
fn rows(gpu: &mut Gpu, width: usize) -> Vec<Vec<f32>> {
    let values = gpu.values(width);
    let of = |change: &dyn Fn(f32) -> f32| values.iter().map(|v| change(*v)).collect();
    vec![
        of(&|v| 30.0 * v * v * v),
        of(&|v| 3.0 * v),
        of(&|v| (v * 4.0).round()),
        of(&|_| 1.5),
        of(&|v| if v > 0.99 { v * 10.0 } else { f32::NEG_INFINITY }),
    ]
}

#[test]
fn draws_among_what_is_kept() {
    let mut gpu = Gpu::open();
    let all = Choice { inverse_temperature: 1.0, farthest: f32::INFINITY, ..Choice::default() };
    let choices = [
        all,
        Choice { farthest: 0.01, inverse_temperature: 0.5, ..all },
        Choice { top_k: 1, ..all },
        Choice { top_k: 50, ..all },
        Choice { top_k: 3000, inverse_temperature: 1.3, ..all },
        Choice { top_k: u32::MAX, ..all },
        Choice { top_p: 0.9, ..all },
        Choice { top_p: 0.3, inverse_temperature: 4.0, ..all },
        Choice { top_p: 1e-6, ..all },
        Choice { top_p: 0.999, farthest: 3.0, ..all },
        Choice { top_k: 40, top_p: 0.8, ..all },
        Choice { top_k: 20_000, top_p: 0.95, farthest: 6.0, inverse_temperature: 0.7, ..all },
    ];
    // One block, odd, and more than the kernel sorts at once.
    for width in [7, 1000, 2049, 50_001, 128_256] {
        let first = 3;
        let rows = rows(&mut gpu, width);
        let tensor = gpu.tensor(&rows.concat(), width, Element::F32);
        let mut buffers = SampleBuffers::new(gpu.stream.context(), rows.len()).expect("room");
        for choice in choices {
            let sorted: Vec<_> = rows.iter().map(|row| kept(row, first, &choice)).collect();
            for race in 0..20 {
                let of_rows: Vec<Choice> = (0..rows.len())
                    .map(|row| Choice { race: mix(race * 8 + row as u64), ..choice })
                    .collect();
                buffers.queue(&gpu.stream, &tensor, first, &of_rows).expect("choose");
                let chosen = buffers.take().expect("choose");
                for (row, (chosen, of_row)) in chosen.iter().zip(&of_rows).enumerate() {
                    let expected = match rows[row].iter().any(|logit| *logit > f32::NEG_INFINITY) {
                        true => (0, winner(&sorted[row], of_row.race)),
                        false => (3, chosen.token),
                    };
                    let kept = sorted[row].len();
                    let what = format!("row {row} of {width}, {of_row:?}, {kept} kept");
                    assert_eq!((chosen.status, chosen.token), expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_second_choice_may_be_queued_before_the_first_is_taken() {
    let mut gpu = Gpu::open();
    let width = 3000;
    let logits = [gpu.values(width), gpu.values(2 * width)];
    let tensors = logits.each_ref().map(|values| gpu.tensor(values, width, Element::F32));
    let table: Vec<f32> = (0..width).flat_map(|token| [token as f32, 1.0]).collect();
    let table = gpu.matrix(&table, 2, Element::F32);
    let mut buffers = SampleBuffers::new(gpu.stream.context(), 2).expect("room");
    let best = |row: &[f32]| {
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter().position(|&logit| logit == best).expect("one") as u32
    };
    let expected = [best(&logits[0]), best(&logits[1][..width]), best(&logits[1][width..])];
    for _ in 0..3 {
        for (tensor, rows) in tensors.iter().zip([1, 2]) {
            buffers.queue(&gpu.stream, tensor, 0, &vec![Choice::default(); rows]).expect("queue");
        }
        assert!(buffers.queue(&gpu.stream, &tensors[0], 0, &[Choice::default()]).is_err());
        // A step may read what was chosen last before anyone else knows.
        let mut inputs = StepInputs::new(gpu.stream.context(), 3, 1, 1).expect("room");
        let sequence = SequenceRows { first_row: 0, rows: 3, context_len: 3, blocks: &[0] };
        inputs.fill([sequence].into_iter(), &[CHOSEN + 1, CHOSEN, 7], &[]).expect("fill");
        inputs.upload(&gpu.stream).expect("copy");
        let mut out = gpu.poisoned(3, 2, Element::F32);
        let vocab = 0..width as u32;
        gpu.stream.embed(&table, (&inputs, &buffers), 3, &vocab, &mut out).expect("embed");
        let tokens = [expected[2] as f32, 1.0, expected[1] as f32, 1.0, 7.0, 1.0];
        assert_eq!(gpu.read(&out), tokens);
        for rows in [0..1, 1..3] {
            let taken: Vec<u32> =
                buffers.take().expect("take").iter().map(|chosen| chosen.token).collect();
            assert_eq!(taken, expected[rows]);
        }
        assert!(buffers.take().expect("take").is_empty());
    }
}
