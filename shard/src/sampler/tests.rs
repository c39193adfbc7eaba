//! The sampler against a reference that sorts the whole vocabulary in one place.

mod choice;
mod distribution;
mod edges;
mod logprobs;
mod masks;
mod reference;
mod scores;

use std::{ops::Range, sync::Arc};

use trireme_collectives::{CollectiveError, local};
use trireme_grammar::Mask;
use trireme_kernels::Team;

use super::{Constraint, SampleError, SampleRow, Sampled, Sampling, sample};

type Outcome = Vec<Result<Sampled, SampleError>>;

/// A row over the whole vocabulary.
#[derive(Clone, Debug)]
struct Case {
    logits: Vec<f32>,
    sampling: Sampling,
    tokens: Vec<u32>,
    prompt_len: usize,
    /// `None` in it: it could not be made.
    mask: Option<Option<Arc<Mask>>>,
}

impl Case {
    fn new(logits: Vec<f32>, sampling: Sampling) -> Self {
        Self { logits, sampling, tokens: vec![0; 7], prompt_len: 5, mask: None }
    }

    fn constraint(&self) -> Constraint<'_> {
        match &self.mask {
            None => Constraint::Free,
            Some(None) => Constraint::Broken,
            Some(Some(mask)) => Constraint::Mask(mask),
        }
    }

    fn greedy(logits: &[f32]) -> Self {
        Self::new(logits.to_vec(), Sampling::default())
    }
}

/// Uneven slices; with five ranks of a small vocabulary some are empty.
fn slices(vocab: usize, tp: usize) -> Vec<Range<usize>> {
    let ends: Vec<usize> = (0..=tp).map(|rank| vocab * rank * rank / (tp * tp)).collect();
    ends.windows(2).map(|ends| ends[0]..ends[1]).collect()
}

fn try_run(cases: &[Case], tp: usize, threads: usize) -> Vec<Result<Outcome, CollectiveError>> {
    let vocab = cases.first().map_or(0, |case| case.logits.len());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = local::worlds(tp, 1)
            .into_iter()
            .zip(slices(vocab, tp))
            .map(|(mut world, slice)| {
                scope.spawn(move || {
                    let rows: Vec<SampleRow<'_>> = (0..)
                        .zip(cases)
                        .map(|(sequence, case)| SampleRow {
                            sequence,
                            sampling: &case.sampling,
                            tokens: &case.tokens,
                            prompt_len: case.prompt_len,
                            constraint: case.constraint(),
                        })
                        .collect();
                    let mut logits: Vec<f32> = cases
                        .iter()
                        .flat_map(|case| &case.logits[slice.clone()])
                        .copied()
                        .collect();
                    let vocab = slice.start as u32..slice.end as u32;
                    sample(&rows, &mut logits, vocab, &mut *world.tensor, &Team::new(threads))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Samples on `tp` ranks, which must agree to the bit.
fn run(cases: &[Case], tp: usize, threads: usize) -> Outcome {
    let mut ranks: Vec<Outcome> = try_run(cases, tp, threads)
        .into_iter()
        .map(|outcome| outcome.expect("the collectives work"))
        .collect();
    let first = ranks.swap_remove(0);
    for (index, rank) in ranks.iter().enumerate() {
        assert_eq!(&first, rank, "rank 0 and another of {tp}, number {index}");
    }
    first
}

/// A seeded sequence (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal: a sum of twelve uniforms.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

/// Shapes of logits that ask for different paths of the selection.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// As a model's: spread out, negative and positive.
    Model,
    /// All nearly equally likely.
    Flat,
    /// All the same.
    Equal,
    /// A few values, so that every cut is among ties.
    Steps,
    /// Two tokens hold almost everything.
    Peaked,
    /// Most tokens impossible.
    Masked,
}

const SHAPES: [Shape; 6] =
    [Shape::Model, Shape::Flat, Shape::Equal, Shape::Steps, Shape::Peaked, Shape::Masked];

fn logits(shape: Shape, vocab: usize, random: &mut Random) -> Vec<f32> {
    let mut draw = |_| match shape {
        Shape::Model => random.normal() * 3.0 + 1.0,
        Shape::Flat => random.unit() * 0.01 - 4.0,
        Shape::Equal => 2.5,
        Shape::Steps => random.below(4) as f32,
        Shape::Peaked => {
            if random.below(vocab / 3 + 1) == 0 {
                20.0
            } else {
                random.normal()
            }
        }
        Shape::Masked => {
            if random.below(10) < 9 {
                f32::NEG_INFINITY
            } else {
                random.normal()
            }
        }
    };
    let mut logits: Vec<f32> = (0..vocab).map(&mut draw).collect();
    // At least one is possible.
    logits[vocab / 2] = logits[vocab / 2].max(0.5);
    logits
}
