//! `download`, `list`, `where`, `remove`: the model store, as a person sees it.

use std::io::{Write, stdout};

use crate::{
    cli::{ListArgs, ModelArgs},
    model_store::{ALIASES, ModelName, ModelStore},
    size,
};

pub fn download(args: &ModelArgs) -> anyhow::Result<()> {
    let path = ModelStore::from_environment().refresh(&ModelName::parse(&args.model)?)?;
    writeln!(stdout(), "{}", path.display())?;
    Ok(())
}

/// Prints the path alone, for scripts: `MODEL=$(trireme where smollm2)`.
pub fn locate(args: &ModelArgs) -> anyhow::Result<()> {
    let path = ModelStore::from_environment().find(&ModelName::parse(&args.model)?)?;
    writeln!(stdout(), "{}", path.display())?;
    Ok(())
}

pub fn remove(args: &ModelArgs) -> anyhow::Result<()> {
    let path = ModelStore::from_environment().remove(&ModelName::parse(&args.model)?)?;
    writeln!(stdout(), "removed {}", path.display())?;
    Ok(())
}

pub fn list(args: &ListArgs) -> anyhow::Result<()> {
    let store = ModelStore::from_environment();
    let models = store.list()?;
    let mut out = stdout().lock();
    if args.json {
        let rows: Vec<_> = models
            .iter()
            .map(|m| {
                serde_json::json!({
                    "name": m.name, "bytes": m.bytes, "path": m.path, "commit": m.commit,
                    "missing": m.missing,
                })
            })
            .collect();
        serde_json::to_writer_pretty(&mut out, &rows)?;
        writeln!(out)?;
        return Ok(());
    }
    for model in &models {
        let (bytes, path) = (size::display(model.bytes), model.path.display());
        match &model.missing {
            None => writeln!(out, "{}\t{bytes}\t{path}", model.name)?,
            Some(missing) => writeln!(
                out,
                "{name}\t{bytes}\tin part only, {missing} is missing: `trireme download {name}` goes on",
                name = model.name
            )?,
        }
    }
    for alias in ALIASES.iter().filter(|a| !models.iter().any(|m| m.name == a.name)) {
        writeln!(
            out,
            "{}\t{}\tnot here yet: {}",
            alias.name,
            size::display(alias.bytes),
            alias.about
        )?;
    }
    Ok(())
}
