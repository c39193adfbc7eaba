use half::bf16;

use super::*;
use crate::matrix::Storage;
use crate::rotary::{RotaryTable, rotate_and_append};
use crate::samples::{assert_same_bits, distance, noise};

/// A sequence of `len` tokens whose q, k and v are noise of its seed.
struct Story {
    len: usize,
    seed: u64,
    blocks: Vec<u32>,
}

/// A cache and what is in it.
struct Case {
    layout: HeadLayout,
    window: Option<usize>,
    pages: KvPages,
    stories: Vec<Story>,
}

/// Some rows of a batch: the last `rows` of the first `context` tokens of a story.
#[derive(Clone, Copy)]
struct Piece {
    story: usize,
    context: usize,
    rows: usize,
}

fn layout(kv_of_head: &[usize], head_dim: usize) -> HeadLayout {
    let kv_heads = kv_of_head.iter().max().unwrap() + 1;
    HeadLayout { heads: kv_of_head.len(), kv_heads, head_dim, kv_of_head: kv_of_head.to_vec() }
}

impl Case {
    /// Stories in shuffled blocks; whatever is not written stays NaN.
    fn new(layout: HeadLayout, window: Option<usize>, storage: Storage, lens: &[usize]) -> Self {
        let total: usize = lens.iter().map(|len| len.div_ceil(16)).sum();
        let mut pages = KvPages::new(total + 1, layout.kv_heads, layout.head_dim, storage);
        match pages.data_mut() {
            PageData::F32(data) => data.fill(f32::NAN),
            PageData::Bf16(data) => data.fill(bf16::NAN),
        }
        let mut next = 0;
        let mut stories = Vec::new();
        for (seed, &len) in lens.iter().enumerate() {
            let blocks = (next..next + len.div_ceil(16)).map(|i| (i * 7 % (total + 1)) as u32);
            let blocks: Vec<u32> = if (total + 1).is_multiple_of(7) {
                (next..next + len.div_ceil(16)).map(|i| (total - i) as u32).collect()
            } else {
                blocks.collect()
            };
            next += blocks.len();
            stories.push(Story { len, seed: seed as u64 + 50, blocks });
        }
        let mut case = Self { layout, window, pages, stories };
        for story in 0..case.stories.len() {
            let mut qkv = case.qkv(story);
            let s = &case.stories[story];
            let rows =
                SequenceRows { first_row: 0, rows: s.len, context_len: s.len, blocks: &s.blocks };
            let flat = RotaryTable { cos: vec![], sin: vec![], half_dim: 0 };
            rotate_and_append(
                &Team::new(1),
                &mut qkv,
                &case.layout,
                &flat,
                &[rows],
                &mut case.pages,
            );
        }
        case
    }

    fn qkv(&self, story: usize) -> Vec<f32> {
        let story = &self.stories[story];
        // Spread enough that the softmax is far from even.
        noise(story.len * self.layout.row_len(), story.seed).iter().map(|x| x * 2.0).collect()
    }

    fn run(&self, isa: Isa, team: &Team, pieces: &[Piece]) -> Vec<Vec<f32>> {
        let (len, width) = (self.layout.row_len(), self.layout.heads * self.layout.head_dim);
        let mut qkv = Vec::new();
        let mut sequences = Vec::new();
        for piece in pieces {
            let all = self.qkv(piece.story);
            sequences.push(SequenceRows {
                first_row: qkv.len() / len,
                rows: piece.rows,
                context_len: piece.context,
                blocks: &self.stories[piece.story].blocks,
            });
            qkv.extend_from_slice(&all[(piece.context - piece.rows) * len..piece.context * len]);
        }
        let mut out = vec![f32::NAN; qkv.len() / len * width];
        let call = Attention {
            isa,
            team,
            qkv: &qkv,
            layout: &self.layout,
            scale: self.scale(),
            window: self.window,
            sequences: &sequences,
            pages: &self.pages,
        };
        call.run(&mut out);
        let part = |s: &SequenceRows<'_>| out[s.first_row * width..][..s.rows * width].to_vec();
        sequences.iter().map(part).collect()
    }

    fn scale(&self) -> f32 {
        (self.layout.head_dim as f32).sqrt().recip()
    }

    /// Plain attention in f64, over keys and values as the pages round them.
    fn reference(&self, piece: Piece) -> Vec<f32> {
        let HeadLayout { heads, kv_heads, head_dim, kv_of_head } = &self.layout;
        let (all, len) = (self.qkv(piece.story), self.layout.row_len());
        let stored = |x: f32| match self.pages.data() {
            PageData::F32(_) => f64::from(x),
            PageData::Bf16(_) => bf16::from_f32(x).to_f64(),
        };
        let mut out = Vec::new();
        for position in piece.context - piece.rows..piece.context {
            let from = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..*heads {
                let q = &all[position * len + head * head_dim..][..*head_dim];
                let k_at = (heads + kv_of_head[head]) * head_dim;
                let v_at = k_at + kv_heads * head_dim;
                let scores: Vec<f64> = (from..=position)
                    .map(|t| {
                        let k = &all[t * len + k_at..][..*head_dim];
                        let dot: f64 =
                            q.iter().zip(k).map(|(q, k)| f64::from(*q) * stored(*k)).sum();
                        dot * f64::from(self.scale())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                for d in 0..*head_dim {
                    let value = |(i, score): (usize, &f64)| {
                        (score - max).exp() * stored(all[(from + i) * len + v_at + d])
                    };
                    out.push((scores.iter().enumerate().map(value).sum::<f64>() / total) as f32);
                }
            }
        }
        out
    }

    fn check(&self, isa: Isa, team: &Team, pieces: &[Piece]) {
        for (got, piece) in self.run(isa, team, pieces).iter().zip(pieces) {
            let error = distance(got, &self.reference(*piece));
            assert!(error < 5e-6, "{} {:?} {:?}: {error}", isa.name(), self.layout, self.window);
        }
    }
}

const MIXED: [Piece; 4] = [
    Piece { story: 0, context: 40, rows: 40 },
    Piece { story: 1, context: 300, rows: 1 },
    Piece { story: 2, context: 17, rows: 2 },
    Piece { story: 1, context: 290, rows: 30 },
];
const LENS: [usize; 3] = [40, 300, 17];

fn layouts() -> Vec<HeadLayout> {
    vec![
        layout(&[0, 0, 0, 1, 1, 1, 2, 2, 2], 64),
        layout(&[0, 1, 2], 17),
        // Uneven and out of order, as a split of replicated KV heads gives.
        layout(&[1, 0, 1, 1, 0, 1, 1], 80),
        // More heads on one KV head than a unit takes.
        layout(&[0; 53], 8),
        layout(&[0, 0, 0, 0, 1, 1, 1, 1], 128),
    ]
}

#[test]
fn agrees_with_f64() {
    let team = Team::new(2);
    for layout in layouts() {
        for storage in [Storage::F32, Storage::Bf16] {
            for window in [None, Some(1), Some(37), Some(260)] {
                let case = Case::new(layout.clone(), window, storage, &LENS);
                for isa in Isa::all() {
                    case.check(isa, &team, &MIXED);
                    // Few units: the stretches of the long one are split.
                    case.check(isa, &team, &MIXED[1..2]);
                }
            }
        }
    }
}

/// The rows of story 1 in one piece on one thread are the measure.
fn check_invariance(isa: Isa, layout: HeadLayout, window: Option<usize>, storage: Storage) {
    let case = Case::new(layout, window, storage, &[40, 600, 33]);
    let (one, width) = (Team::new(1), case.layout.heads * case.layout.head_dim);
    let whole = case.run(isa, &one, &[Piece { story: 1, context: 600, rows: 600 }]).remove(0);
    let others =
        [Piece { story: 0, context: 40, rows: 33 }, Piece { story: 2, context: 33, rows: 1 }];
    for threads in [1, 2, 5] {
        let team = Team::new(threads);
        for chunk in [1, 7, 64, 600] {
            for context in [chunk, 257.max(chunk), 512.max(chunk), 600] {
                let mine = Piece { story: 1, context, rows: chunk };
                let what = format!("{} {threads} threads, {chunk} of {context}", isa.name());
                let want = &whole[(context - chunk) * width..context * width];
                assert_same_bits(&case.run(isa, &team, &[mine])[0], want, &what);
                let batch = [others[0], mine, others[1]];
                assert_same_bits(&case.run(isa, &team, &batch)[1], want, &what);
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_chunks_batch_or_threads() {
    for isa in Isa::all() {
        for storage in [Storage::F32, Storage::Bf16] {
            for window in [None, Some(100)] {
                check_invariance(isa, layout(&[0, 0, 0, 1, 1, 1], 32), window, storage);
            }
        }
    }
}

#[test]
#[should_panic(expected = "row 0 comes after 1")]
fn overlapping_sequences_are_refused() {
    let layout = layout(&[0], 8);
    let pages = KvPages::new(1, 1, 8, Storage::F32);
    let s = SequenceRows { first_row: 0, rows: 1, context_len: 1, blocks: &[0] };
    let (qkv, mut out) = ([0.0; 48], [0.0; 16]);
    let team = Team::new(1);
    paged_attention(&team, &qkv, &layout, 1.0, None, &[s.clone(), s], &pages, &mut out);
}
