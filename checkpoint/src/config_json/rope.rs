//! Rotary fields: `rope_parameters` (transformers 5), else `rope_scaling` and a `rope_theta` beside
//! it (transformers 4).

use serde_json::Value;

use super::fields::Fields;
use crate::{CheckpointError, RopeScaling};

/// Meta's and transformers' default where a config does not say.
pub(super) const DEFAULT_THETA: f64 = 10_000.0;

const SUPPORTED: &str =
    "one of: default, linear, llama3, yarn, longrope (others are not supported yet)";

/// Rotary fields of a model.
#[derive(Debug)]
pub(super) struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
    pub rotary_dim: usize,
    /// Of sliding layers, where the config tells the kinds of layers apart.
    pub sliding_theta: Option<f64>,
}

/// Reads the rotary fields of heads of `head_dim`, with the family's base, and whether it may leave the
/// rest of a head as it is.
pub(super) fn read(
    fields: &Fields<'_>,
    head_dim: usize,
    default_theta: f64,
    may_be_partial: bool,
) -> Result<Rope, CheckpointError> {
    let parameters = fields.nested("rope_parameters")?;
    let (by_kind, sliding_theta) = match &parameters {
        Some(parameters) => by_kind(parameters)?,
        None => (None, None),
    };
    let scaling = match &parameters {
        Some(_) => None,
        None => fields.nested("rope_scaling")?,
    };
    let nested = by_kind.as_ref().or(parameters.as_ref()).or(scaling.as_ref());
    let own = |name| match nested {
        Some(nested) => nested.optional_number(name),
        None => Ok(None),
    };
    let either = |name| match own(name)? {
        Some(value) => Ok(Some(value)),
        None => fields.optional_number(name),
    };
    let theta = either("rope_theta")?.unwrap_or(default_theta);
    let rotary_dim = match either("partial_rotary_factor")? {
        None | Some(1.0) => head_dim,
        Some(part) if may_be_partial && part > 0.0 && part < 1.0 => {
            (head_dim as f64 * part) as usize
        }
        Some(part) => {
            let expected = if may_be_partial { "above 0, at most 1" } else { "1 in this family" };
            return Err(fields.refuse("partial_rotary_factor", expected, part));
        }
    };
    let scaling = match nested {
        None => RopeScaling::None,
        Some(nested) => Scaling { model: fields, nested, rotary_dim }.read()?,
    };
    Ok(Rope { theta, scaling, rotary_dim, sliding_theta })
}

/// Where `rope_parameters` has an object for each kind of layer: that of full attention, and the
/// base of sliding attention.
fn by_kind<'a>(
    parameters: &'a Fields<'a>,
) -> Result<(Option<Fields<'a>>, Option<f64>), CheckpointError> {
    let Some(full) = parameters.nested("full_attention")? else { return Ok((None, None)) };
    let Some(sliding) = parameters.nested("sliding_attention")? else {
        return Ok((Some(full), None));
    };
    match sliding.get("rope_type") {
        None => {}
        Some(Value::String(kind)) if kind == "default" => {}
        Some(other) => return Err(sliding.refuse("rope_type", "default", other)),
    }
    Ok((Some(full), sliding.optional_number("rope_theta")?))
}

/// The scaling in `nested`, of `model`.
struct Scaling<'a> {
    model: &'a Fields<'a>,
    nested: &'a Fields<'a>,
    rotary_dim: usize,
}

impl Scaling<'_> {
    fn read(&self) -> Result<RopeScaling, CheckpointError> {
        let nested = self.nested;
        let key = if nested.get("rope_type").is_some() { "rope_type" } else { "type" };
        match nested.get(key) {
            // transformers 5 keeps rope_theta here too, and takes no type for no scaling.
            None if nested.get("factor").is_none() => Ok(RopeScaling::None),
            None => Err(nested.absent("rope_type", "the kind of scaling")),
            Some(Value::String(kind)) => match kind.as_str() {
                "default" => Ok(RopeScaling::None),
                "linear" => Ok(RopeScaling::Linear { factor: nested.factor("factor")? }),
                "llama3" => self.llama3(),
                "yarn" => self.yarn(),
                "longrope" | "su" => self.longrope(),
                _ => Err(nested.refuse(key, SUPPORTED, kind)),
            },
            Some(other) => Err(nested.refuse(key, "a string", other)),
        }
    }

    fn llama3(&self) -> Result<RopeScaling, CheckpointError> {
        let nested = self.nested;
        let low = nested.factor("low_freq_factor")?;
        let high = nested.factor("high_freq_factor")?;
        if high <= low {
            let expected = format!("more than low_freq_factor ({low})");
            return Err(nested.refuse("high_freq_factor", expected, high));
        }
        Ok(RopeScaling::Llama3 {
            factor: nested.factor("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: nested.size("original_max_position_embeddings")?,
        })
    }

    fn yarn(&self) -> Result<RopeScaling, CheckpointError> {
        let nested = self.nested;
        let factor = nested.factor("factor")?;
        let original = "original_max_position_embeddings";
        let context = match nested.optional_size(original)? {
            Some(size) => size,
            None => self.model.size("max_position_embeddings")?,
        };
        let beta = |name, default| match nested.get(name) {
            None => Ok(default),
            Some(_) => nested.factor(name),
        };
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: context,
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            truncate: nested.optional_bool("truncate")?.unwrap_or(true),
            attention_factor: self.yarn_attention_factor(factor)?,
        })
    }

    /// `0.1 ln(factor) + 1`, or what the config says in its place.
    fn yarn_attention_factor(&self, factor: f64) -> Result<f64, CheckpointError> {
        let nested = self.nested;
        if nested.get("attention_factor").is_some() {
            return nested.factor("attention_factor");
        }
        let magnitude =
            |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let scale = |name| nested.optional_number(name).map(|it| it.filter(|&it| it != 0.0));
        match (scale("mscale")?, scale("mscale_all_dim")?) {
            (Some(own), Some(all)) => Ok(magnitude(own) / magnitude(all)),
            _ => Ok(magnitude(1.0)),
        }
    }

    fn longrope(&self) -> Result<RopeScaling, CheckpointError> {
        let (nested, model) = (self.nested, self.model);
        let longest = model.size("max_position_embeddings")?;
        let original = "original_max_position_embeddings";
        let context = match model.optional_size(original)? {
            Some(size) => Some(size),
            None => nested.optional_size(original)?,
        };
        let (context, factor) = match context {
            Some(0) => return Err(model.refuse(original, "at least 1", 0)),
            Some(context) => (context, longest as f64 / context as f64),
            None => (longest, nested.factor("factor")?),
        };
        let attention_factor = if nested.get("attention_factor").is_some() {
            nested.factor("attention_factor")?
        } else if factor <= 1.0 {
            1.0
        } else {
            (1.0 + factor.ln() / (context as f64).ln()).sqrt()
        };
        Ok(RopeScaling::LongRope {
            short_factors: nested.factors("short_factor", self.rotary_dim / 2)?,
            long_factors: nested.factors("long_factor", self.rotary_dim / 2)?,
            original_max_position_embeddings: context,
            attention_factor,
        })
    }
}
