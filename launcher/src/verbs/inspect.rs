//! `inspect`: what a model is, what it needs, and how it can be split.

use std::{
    io::{Write, stdout},
    path::PathBuf,
};

use serde_json::{Value, json};
use trireme_checkpoint::{Checkpoint, MemoryEstimate, ModelConfig, Split};

use crate::{
    cli::InspectArgs,
    config::Dtype,
    instance::open_checkpoint,
    model_store::{ModelName, ModelStore},
    size,
    topology::BLOCK_TOKENS,
};

pub fn inspect(args: &InspectArgs) -> anyhow::Result<()> {
    let path = ModelStore::from_environment().fetch(&ModelName::parse(&args.model.model)?)?;
    let checkpoint = open_checkpoint(&path, args.load_format, 0)?;
    let report = Report::new(path, &checkpoint, args);
    let mut out = stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report.json())?;
        writeln!(out)?;
    } else {
        out.write_all(report.text().as_bytes())?;
    }
    Ok(())
}

/// One possible split, with the memory of its fullest rank.
struct Row {
    split: Split,
    weight_bytes: u64,
    kv_bytes_per_token: u64,
}

struct Report {
    path: PathBuf,
    format: String,
    model: ModelConfig,
    dtype: &'static str,
    kv_dtype: &'static str,
    rows: Vec<Row>,
}

impl Report {
    fn new(path: PathBuf, checkpoint: &Checkpoint, args: &InspectArgs) -> Self {
        let model = checkpoint.model().clone();
        let (dtype, weight_size) = args.dtype.storage(Dtype::CPU_WEIGHTS);
        let (kv_dtype, kv_size) = args.kv_dtype.storage((dtype, weight_size));
        let rows = (1..=args.ranks.get())
            .flat_map(|ranks| Split::legal(&model, ranks))
            .map(|split| {
                let ranks = (0..split.tp * split.pp).map(|rank| {
                    let slice = split.slice(&model, rank);
                    MemoryEstimate::of(&model, &slice, weight_size, kv_size, BLOCK_TOKENS)
                });
                let (weight_bytes, kv_bytes) = ranks.fold((0, 0), |(weights, kv), rank| {
                    (rank.weight_bytes.max(weights), rank.kv_bytes_per_block.max(kv))
                });
                Row { split, weight_bytes, kv_bytes_per_token: kv_bytes / BLOCK_TOKENS as u64 }
            })
            .collect();
        let format = format!("{:?}", checkpoint.format()).to_lowercase();
        Self { path, format, model, dtype, kv_dtype, rows }
    }

    fn family(&self) -> String {
        format!("{:?}", self.model.family).to_lowercase()
    }

    /// Numbers of the model: one byte each on one rank.
    fn parameters(&self) -> u64 {
        let whole = Split { tp: 1, pp: 1 }.slice(&self.model, 0);
        MemoryEstimate::of(&self.model, &whole, 1, 1, BLOCK_TOKENS).weight_bytes
    }

    fn json(&self) -> Value {
        let m = &self.model;
        let rows = self.rows.iter().map(|row| {
            json!({
                "tp": row.split.tp, "pp": row.split.pp, "ranks": row.split.tp * row.split.pp,
                "weight_bytes_per_rank": row.weight_bytes,
                "kv_bytes_per_token_per_rank": row.kv_bytes_per_token,
            })
        });
        json!({
            "path": self.path, "format": self.format, "family": self.family(),
            "parameters": self.parameters(),
            "layers": m.layers, "hidden_size": m.hidden_size,
            "intermediate_size": m.intermediate_size, "heads": m.heads, "kv_heads": m.kv_heads,
            "head_dim": m.head_dim, "vocab_size": m.vocab_size,
            "max_position_embeddings": m.max_position_embeddings,
            "tied_embeddings": m.tied_embeddings, "eos_token_ids": m.eos_token_ids,
            "dtype": self.dtype, "kv_dtype": self.kv_dtype,
            "splits": rows.collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let m = &self.model;
        let mut lines = vec![
            format!("path        {}", self.path.display()),
            format!("format      {}", self.format),
            format!("family      {}", self.family()),
            format!("parameters  {:.1} M", self.parameters() as f64 / 1e6),
            format!("layers      {}", m.layers),
            format!("width       {} (MLP {})", m.hidden_size, m.intermediate_size),
            format!(
                "heads       {} of {} ({} for keys and values)",
                m.heads, m.head_dim, m.kv_heads
            ),
            format!(
                "vocabulary  {}{}",
                m.vocab_size,
                if m.tied_embeddings { ", head tied" } else { "" }
            ),
            format!("context     {} tokens", m.max_position_embeddings),
            String::new(),
            format!(
                "Possible splits, memory of the fullest rank (weights {}, KV cache {}):",
                self.dtype, self.kv_dtype
            ),
            format!(
                "{:>4} {:>4} {:>6} {:>12} {:>14}",
                "tp", "pp", "ranks", "weights", "KV per token"
            ),
        ];
        lines.extend(self.rows.iter().map(|row| {
            let Split { tp, pp } = row.split;
            let (weights, kv) =
                (size::display(row.weight_bytes), size::display(row.kv_bytes_per_token));
            format!("{tp:>4} {pp:>4} {:>6} {weights:>12} {kv:>14}", tp * pp)
        }));
        lines.join("\n") + "\n"
    }
}
