//! `inspect`: what a model is, what it needs, and how it can be split.

mod memory_plan;

use std::io::{Write, stdout};

use serde_json::{Value, json};
use trireme_checkpoint::{Checkpoint, Description, OpenOptions, Split};

use self::memory_plan::{MemoryPlan, RankMemory, Storage, plans};
use crate::{
    cli::InspectArgs,
    config::{Dtype, LoadFormat},
    instance::open_checkpoint,
    model_store::{ModelName, ModelStore},
    preflight::memory_bytes,
    size,
    topology::TopologyError,
};

pub fn inspect(args: &InspectArgs) -> anyhow::Result<()> {
    let (store, name) = (ModelStore::from_environment(), ModelName::parse(&args.model.model)?);
    // To look at a repository must not fetch hundreds of gigabytes.
    let path = match name {
        ModelName::Repo(_) => store.find(&name)?,
        _ => store.fetch(&name)?,
    };
    let checkpoint = match (args.scan_values, args.load_format) {
        (true, LoadFormat::Auto) => {
            Checkpoint::open_with(&path, OpenOptions { scan_values: true })?
        }
        _ => open_checkpoint(&path, args.load_format, 0)?,
    };
    let report = Report::new(&checkpoint, args)?;
    let mut out = stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report.json())?;
        writeln!(out)?;
    } else {
        out.write_all(report.text().as_bytes())?;
    }
    Ok(())
}

/// Why the plan that is shown is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Given,
    /// The fewest ranks that fit into this many bytes each.
    Recommended(u64),
    /// Nothing fits into this many bytes: the most ranks.
    NoneFits(u64),
}

struct Report {
    description: Description,
    dtype: &'static str,
    kv_dtype: &'static str,
    choice: Choice,
    plan: MemoryPlan,
    plans: Vec<MemoryPlan>,
}

impl Report {
    fn new(checkpoint: &Checkpoint, args: &InspectArgs) -> Result<Self, TopologyError> {
        let description = checkpoint.describe();
        let model = &description.model;
        let (dtype, weight_size) = args.dtype.storage(Dtype::CPU_WEIGHTS);
        let (kv_dtype, kv_size) = args.kv_dtype.storage(match args.dtype {
            Dtype::Quantized => Dtype::CPU_WEIGHTS,
            _ => (dtype, weight_size),
        });
        let storage = Storage { weight_size, kv_size };
        let plans = plans(model, args.ranks.get(), storage);
        let (choice, plan) = if args.tp.is_some() || args.pp.is_some() {
            let split = Split {
                tp: args.tp.map_or(1, |tp| tp.get()),
                pp: args.pp.map_or(1, |pp| pp.get()),
            };
            split.check(model).map_err(|cause| TopologyError::Split {
                tp: split.tp,
                pp: split.pp,
                cause,
            })?;
            (Choice::Given, MemoryPlan::of(model, split, storage))
        } else {
            let memory = args.device_memory.map(|size| size.0).or_else(memory_bytes);
            let memory = memory.unwrap_or(u64::MAX);
            match MemoryPlan::recommended(&plans, memory) {
                Some(plan) => (Choice::Recommended(memory), plan.clone()),
                None => {
                    let split = plans.last().map_or(Split { tp: 1, pp: 1 }, |plan| plan.split);
                    (Choice::NoneFits(memory), MemoryPlan::of(model, split, storage))
                }
            }
        };
        Ok(Self { description, dtype, kv_dtype, choice, plan, plans })
    }

    fn format(&self) -> String {
        format!("{:?}", self.description.format).to_lowercase()
    }

    fn family(&self) -> String {
        format!("{:?}", self.description.model.family).to_lowercase()
    }

    fn json(&self) -> Value {
        let d = &self.description;
        let m = &d.model;
        let splits = self.plans.iter().map(|plan| {
            json!({
                "tp": plan.split.tp, "pp": plan.split.pp, "ranks": plan.ranks.len(),
                "weight_bytes_per_rank": plan.most(|rank| rank.weight_bytes),
                "kv_bytes_per_token_per_rank": plan.most(|rank| rank.kv_bytes_per_token),
            })
        });
        let (choice, memory) = match self.choice {
            Choice::Given => ("given", None),
            Choice::Recommended(memory) => ("recommended", Some(memory)),
            Choice::NoneFits(memory) => ("none fits", Some(memory)),
        };
        json!({
            "path": d.path, "format": self.format(), "family": self.family(),
            "parameters": d.parameters, "tensor_bytes": d.tensor_bytes,
            "files": d.files, "dtypes": d.dtypes,
            "layers": m.layers, "hidden_size": m.hidden_size,
            "intermediate_size": m.intermediate_size, "heads": m.heads, "kv_heads": m.kv_heads,
            "head_dim": m.head_dim, "experts": m.experts, "vocab_size": m.vocab_size,
            "max_position_embeddings": m.max_position_embeddings,
            "tied_embeddings": m.tied_embeddings, "eos_token_ids": m.eos_token_ids,
            "dtype": self.dtype, "kv_dtype": self.kv_dtype,
            "plan_is": choice, "device_memory_bytes": memory, "plan": self.plan,
            "splits": splits.collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let mut lines = self.model_lines();
        lines.push(String::new());
        lines.extend(self.plan_lines());
        lines.push(String::new());
        lines.extend(self.split_lines());
        lines.join("\n") + "\n"
    }

    fn model_lines(&self) -> Vec<String> {
        let d = &self.description;
        let m = &d.model;
        let tied = if m.tied_embeddings { ", head tied" } else { "" };
        let dtypes = d.dtypes.iter().map(|(name, tally)| {
            format!("{name} {} tensors {}", tally.tensors, size::display(tally.bytes))
        });
        let dtypes = match d.dtypes.is_empty() {
            true => "made up".to_owned(),
            false => dtypes.collect::<Vec<_>>().join(", "),
        };
        let mut lines = vec![
            format!("path        {}", d.path.display()),
            format!("format      {}", self.format()),
            format!("family      {}", self.family()),
            format!("parameters  {:.1} M", d.parameters as f64 / 1e6),
            format!("tensors     {dtypes}"),
        ];
        lines.extend(d.files.iter().map(|file| {
            format!("file        {} ({})", file.path.display(), size::display(file.bytes))
        }));
        lines.extend([
            format!("layers      {}", m.layers),
            format!("width       {} (MLP {})", m.hidden_size, m.intermediate_size),
            format!(
                "heads       {} of {} ({} for keys and values)",
                m.heads, m.head_dim, m.kv_heads
            ),
            format!("vocabulary  {}{tied}", m.vocab_size),
            format!("context     {} tokens", m.max_position_embeddings),
        ]);
        lines.extend(m.experts.iter().map(|experts| {
            let (count, width) = (experts.count, experts.width);
            format!("experts     {count} of width {width}, {} for a token", experts.per_token)
        }));
        lines
    }

    fn plan_lines(&self) -> Vec<String> {
        let Split { tp, pp } = self.plan.split;
        let least = size::display(self.plan.most(RankMemory::least_bytes));
        let why = match self.choice {
            Choice::Given => "as given".to_owned(),
            Choice::Recommended(memory) => format!(
                "recommended: the fewest ranks whose {least} fit into {} each",
                size::display(memory)
            ),
            Choice::NoneFits(memory) => format!(
                "no split shown here fits into {} a rank: this one needs {least}; see --ranks, --kv-dtype",
                size::display(memory)
            ),
        };
        let mut lines = vec![
            format!(
                "Plan --tp {tp} --pp {pp} (weights {}, KV cache {}), {why}:",
                self.dtype, self.kv_dtype
            ),
            format!(
                "{:>4} {:>8} {:>8} {:>8} {:>12} {:>13} {:>14}",
                "rank", "layers", "heads", "KV heads", "weights", "KV per token", "KV, full length"
            ),
        ];
        let range = |range: &std::ops::Range<usize>| format!("{}..{}", range.start, range.end);
        lines.extend(self.plan.ranks.iter().map(|rank| {
            format!(
                "{:>4} {:>8} {:>8} {:>8} {:>12} {:>13} {:>15}",
                rank.rank,
                range(&rank.slice.layers),
                range(&rank.slice.heads),
                range(&rank.slice.kv_heads),
                size::display(rank.weight_bytes),
                size::display(rank.kv_bytes_per_token),
                size::display(rank.kv_bytes_per_sequence),
            )
        }));
        lines
    }

    fn split_lines(&self) -> Vec<String> {
        let mut lines = vec![
            "Possible splits, memory of the fullest rank:".to_owned(),
            format!(
                "{:>4} {:>4} {:>6} {:>12} {:>14}",
                "tp", "pp", "ranks", "weights", "KV per token"
            ),
        ];
        lines.extend(self.plans.iter().map(|plan| {
            let weights = size::display(plan.most(|rank| rank.weight_bytes));
            let kv = size::display(plan.most(|rank| rank.kv_bytes_per_token));
            let Split { tp, pp } = plan.split;
            format!("{tp:>4} {pp:>4} {:>6} {weights:>12} {kv:>14}", plan.ranks.len())
        }));
        lines
    }
}
