//! All ranks of a model as threads of this process, each running the same script.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use trireme_checkpoint::{Checkpoint, ModelConfig, Split};
use trireme_collectives::local;
use trireme_kernels::{KvPages, Storage};
use trireme_shard::{
    config::{Backend, Config, Identity, LoadFormat},
    device::{
        Device,
        cpu::{Cpu, WeightStore},
    },
    runner::{Runner, WarmupPlan},
    sampler::{Sampling, Scoring},
    server,
    status::Status,
    step::{BlockUpdate, Chunk, NewSequence, Step},
};

use super::expected::Prompt;

const MAX_MODEL_LEN: usize = 256;
const MAX_SEQUENCES: usize = 128;
const NUM_BLOCKS: usize = 160;

pub struct Model {
    path: PathBuf,
    split: Split,
    pub config: ModelConfig,
    keep_blocks: bool,
}

impl Model {
    pub fn open(path: &Path, tp: usize, pp: usize) -> Self {
        let config = Checkpoint::open(path).expect("open").model().clone();
        Self { path: path.to_owned(), split: Split { tp, pp }, config, keep_blocks: false }
    }

    /// The same with quantised weights as they are stored.
    pub fn keeping_blocks(self) -> Self {
        Self { keep_blocks: true, ..self }
    }

    pub fn name(&self) -> String {
        let file = self.path.file_name().unwrap_or_default().to_string_lossy();
        format!("{file} tp {} pp {}", self.split.tp, self.split.pp)
    }

    /// Rank 0 of the last stage.
    pub fn answering_rank(&self) -> usize {
        (self.split.pp - 1) * self.split.tp
    }

    /// Rows of the whole vocabulary from every rank's slice of it.
    pub fn join_vocabulary(&self, parts: &[&[f32]], rows: usize) -> Vec<Vec<f64>> {
        let mut joined = vec![vec![f64::NAN; self.config.vocab_size]; rows];
        for (rank, part) in parts.iter().enumerate().skip(self.answering_rank()) {
            let vocab = self.split.slice(&self.config, rank).vocab;
            assert_eq!(part.len(), rows * vocab.len(), "rank {rank} holds its slice");
            for (row, values) in joined.iter_mut().zip(part.chunks_exact(vocab.len())) {
                for (to, from) in row[vocab.clone()].iter_mut().zip(values) {
                    *to = f64::from(*from);
                }
            }
        }
        assert!(joined.iter().flatten().all(|logit| logit.is_finite()), "slices cover all");
        joined
    }

    fn runner(&self, rank: usize) -> Runner<Cpu> {
        let identity = Identity {
            rank,
            split: self.split,
            device: "cpu".into(),
            dtype: "f32",
            kv_dtype: "f32",
        };
        let config = Config {
            identity,
            model: self.path.clone(),
            load_format: LoadFormat::Auto,
            seed: 0,
            weights: WeightStore { numbers: Storage::F32, keep_blocks: self.keep_blocks },
            kv_storage: Storage::F32,
            threads: 1,
            socket: PathBuf::new(),
            kv_cache_memory: None,
            backend: Backend::Cpu,
        };
        let status = Status::default();
        let runner = server::load(&config, &status).expect("load");
        let bytes = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (loaded, total) = (bytes(&status.bytes_loaded), bytes(&status.bytes_total));
        assert_eq!(loaded, total, "{} rank {rank}: bytes loaded, bytes promised", self.name());
        runner
    }
}

/// Runs `script` on every rank at once; answers in rank order.
pub fn on_ranks<T: Send>(model: &Model, script: impl Fn(&mut Runner<Cpu>) -> T + Sync) -> Vec<T> {
    let worlds = local::worlds(model.split.tp, model.split.pp);
    thread::scope(|scope| {
        let script = &script;
        let ranks: Vec<_> = worlds
            .into_iter()
            .enumerate()
            .map(|(rank, world)| {
                scope.spawn(move || {
                    let mut runner = model.runner(rank);
                    runner.device.join(world).expect("join");
                    let plan = WarmupPlan {
                        max_batch_tokens: 512,
                        max_sequences: MAX_SEQUENCES,
                        max_model_len: MAX_MODEL_LEN,
                        num_blocks: NUM_BLOCKS,
                    };
                    runner.warmup(&plan).expect("warm up");
                    script(&mut runner)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("rank")).collect()
    })
}

fn sequence(id: u64, prompt: &Prompt) -> NewSequence {
    NewSequence {
        id,
        tokens: prompt.ids.clone(),
        prompt_len: prompt.ids.len(),
        sampling: Ok(Sampling { logprobs: true, ..Sampling::default() }),
        scoring: Ok(Some(Scoring { start: 0, top_logprobs: 5 })),
    }
}

/// One prompt as one chunk, in scattered blocks; forgets the prompt before it.
pub fn scored_step(id: u64, prompt: &Prompt, scatter: u64) -> Step {
    let count = prompt.ids.len().div_ceil(KvPages::BLOCK_TOKENS) as u64;
    let append = (0..count).rev().map(|block| ((block * 3 + scatter) % NUM_BLOCKS as u64) as u32);
    Step {
        drop: id.checked_sub(1).into_iter().collect(),
        new: vec![sequence(id, prompt)],
        blocks: vec![BlockUpdate { sequence: id, append: append.collect() }],
        chunks: vec![Chunk { sequence: id, start: 0, len: prompt.ids.len(), sample: true }],
        ..Step::default()
    }
}

/// Admits all prompts, with blocks for their new tokens too, interleaved over the pool.
pub fn prefill_all(prompts: &[Prompt], new_tokens: usize) -> Step {
    let mut step = Step::default();
    let mut free = (0..NUM_BLOCKS as u32).rev();
    for (id, prompt) in prompts.iter().enumerate() {
        let count = (prompt.ids.len() + new_tokens).div_ceil(KvPages::BLOCK_TOKENS);
        let append: Vec<u32> = free.by_ref().take(count).collect();
        assert_eq!(append.len(), count, "the pool holds all prompts");
        step.blocks.push(BlockUpdate { sequence: id as u64, append });
        step.new.push(sequence(id as u64, prompt));
    }
    step
}
