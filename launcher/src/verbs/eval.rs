//! `eval`: local tasks through a server, scored as lm-evaluation-harness scores them.

mod harness;
mod metrics;
mod task;

use std::{
    fs::File,
    io::{BufWriter, Write, stdout},
};

use anyhow::Context;
use serde_json::{Value, json};

use super::session::{self, Interrupt, with_server};
use crate::cli::EvalArgs;
use harness::Harness;
use metrics::{Metric, metrics};
use task::Task;

/// One task's outcome.
struct Row {
    task: String,
    kind: &'static str,
    documents: usize,
    metrics: Vec<Metric>,
}

pub fn eval(args: &EvalArgs) -> anyhow::Result<()> {
    let mut tasks =
        args.tasks.iter().map(|path| Task::read(path)).collect::<Result<Vec<_>, _>>()?;
    if let Some(limit) = args.limit {
        tasks.iter_mut().for_each(|task| task.documents.truncate(limit.get()));
    }
    let mut answers = match &args.answers {
        None => None,
        Some(path) => {
            let file = File::create(path);
            let file = file.with_context(|| format!("--answers {}: create", path.display()))?;
            Some(BufWriter::new(file))
        }
    };
    let engine = session::engine(&args.engine);
    with_server(&args.engine, &engine, &args.connect, Interrupt::Ends, async |channel| {
        let harness = Harness::new(channel).await?;
        let mut rows = Vec::new();
        for task in &tasks {
            let outcomes = harness.run(task, args.concurrency.get()).await?;
            if let Some(file) = &mut answers {
                for (document, outcome) in outcomes.iter().enumerate() {
                    let line = json!({"task": task.name, "document": document, "answer": outcome});
                    writeln!(file, "{line}").context("--answers: write")?;
                }
            }
            rows.push(Row {
                task: task.name.clone(),
                kind: task.documents.kind(),
                documents: outcomes.len(),
                metrics: metrics(&task.documents, &outcomes),
            });
        }
        let text = match args.json {
            true => format!("{:#}\n", report(harness.model(), &rows)),
            false => table(&rows),
        };
        stdout().write_all(text.as_bytes())?;
        Ok(())
    })?;
    answers.map_or(Ok(()), |mut file| file.flush()).context("--answers: write")
}

fn report(model: &str, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let metrics: serde_json::Map<String, Value> = row
            .metrics
            .iter()
            .map(|metric| (metric.name.to_owned(), json!(metric.value)))
            .collect();
        json!({
            "task": row.task, "kind": row.kind, "documents": row.documents, "metrics": metrics,
        })
    };
    json!({"model": model, "tasks": rows.iter().map(row).collect::<Vec<_>>()})
}

/// One line a metric, columns as wide as what stands in them.
fn table(rows: &[Row]) -> String {
    let mut lines = vec![["task", "kind", "documents", "metric", "value"].map(str::to_owned)];
    for row in rows {
        for metric in &row.metrics {
            lines.push([
                row.task.clone(),
                row.kind.to_owned(),
                row.documents.to_string(),
                metric.name.to_owned(),
                format!("{:.4}", metric.value),
            ]);
        }
    }
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: Vec<usize> = (0..5).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let metrics = vec![
            Metric { name: "acc", value: 0.75 },
            Metric { name: "acc_norm", value: 2.0 / 3.0 },
        ];
        vec![Row { task: "colours".into(), kind: "choice", documents: 12, metrics }]
    }

    #[test]
    fn a_table_lines_up() {
        let expected = "task     kind    documents  metric    value\n\
                        colours  choice  12         acc       0.7500\n\
                        colours  choice  12         acc_norm  0.6667\n";
        assert_eq!(table(&rows()), expected);
    }

    #[test]
    fn a_report_has_the_metrics_by_name() {
        let report = report("tiny", &rows());
        assert_eq!(report["model"], "tiny");
        assert_eq!(report["tasks"][0]["metrics"]["acc"], 0.75);
    }
}
