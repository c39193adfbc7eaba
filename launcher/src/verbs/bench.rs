//! `bench`: what the engine does in a second, without HTTP.
//!
//! The sweep and the load speak gRPC over the control socket with prompts of token ids. `--steps`
//! leaves the router out and drives the shards, then decodes the same batches through the router:
//! the time between tokens there less the engine's time of a step here is what router and RPC add.

mod figures;
mod load;
mod mixed;
mod prompts;
mod steps;
mod sweep;

use std::{
    io::{Write, stdout},
    num::NonZeroU32,
};

use serde_json::Value;

use super::session::{self, Interrupt, with_server};
use crate::{cli::BenchArgs, config::Limits};

pub fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    let mut engine = session::engine(&args.engine);
    let widest = args.batch.iter().copied().max().unwrap_or(NonZeroU32::MIN);
    if args.engine.max_sequences.is_none() {
        // A wide sweep must not be queued by a smaller default.
        let sequences = widest.max(Limits::SEQUENCES_DEFAULT);
        let tokens = sequences.max(Limits::BATCH_TOKENS_DEFAULT);
        let tokens = *engine.limits.max_batch_tokens.get_or_insert(tokens);
        engine.limits.max_sequences = Some(sequences.min(tokens));
    }
    let mut report = Report::new(args.json);
    let steps = match args.steps {
        true => steps::bench(args, &engine, &mut report)?,
        false => Vec::new(),
    };
    with_server(&args.engine, &engine, &args.connect, Interrupt::Ends, async |channel| {
        let info = crate::answer::client(channel.clone())
            .info(trireme_proto::generate::v1::InfoRequest {})
            .await?
            .into_inner();
        let bench = sweep::Bench { channel, args };
        report.row(serde_json::json!({
            "model": info.model, "tp": info.tp, "pp": info.pp, "dtype": info.dtype,
        }))?;
        match (args.load, args.mixed) {
            (Some(shape), _) => report.row(load::run(&bench, shape).await?)?,
            (None, Some(shape)) => report.row(mixed::run(&bench, shape).await?)?,
            (None, None) if args.steps => {
                for (step, routed) in steps.iter().zip(sweep::decode_all(&bench).await?) {
                    report.row(step.overhead(&routed, args.engine.pp))?;
                }
            }
            (None, None) => sweep::run(&bench, &mut report).await?,
        }
        Ok(())
    })?;
    report.end()
}

/// Rows of figures: a line each as they come, or one JSON array at the end.
struct Report {
    json: bool,
    rows: Vec<Value>,
}

impl Report {
    fn new(json: bool) -> Self {
        Self { json, rows: Vec::new() }
    }

    fn row(&mut self, row: Value) -> anyhow::Result<()> {
        if !self.json {
            let cells = row.as_object().into_iter().flatten().map(|(name, value)| match value {
                Value::String(text) => format!("{name} {text}"),
                Value::Number(number) if number.is_f64() => {
                    format!("{name} {:.2}", number.as_f64().unwrap_or(f64::NAN))
                }
                other => format!("{name} {other}"),
            });
            writeln!(stdout(), "{}", cells.collect::<Vec<_>>().join("  "))?;
        }
        self.rows.push(row);
        Ok(())
    }

    fn end(self) -> anyhow::Result<()> {
        if self.json {
            writeln!(stdout(), "{:#}", Value::Array(self.rows))?;
        }
        Ok(())
    }
}
