//! GGUF metadata as a model's config (ggml `docs/gguf.md`; keys as llama.cpp's converter writes them).

use crate::{
    Activation, CheckpointError, ExpertConfig, Family, LayerConfig, ModelConfig, Multipliers,
    RopeScaling, SlidingWindow,
    config::{FieldNames, MOST_LAYERS},
    gguf_metadata::Metadata,
    mapping::MappedFile,
    tensor_index::StoredTensor,
};

/// Divisors of the rotary frequencies: of Llama 3.1's scaling, and of LongRoPE's two lists.
const ROPE_DIVISORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// Tokens that end a turn, for files that name only the token that ends a document.
const TURN_ENDS: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];

/// Gemma 3's layers that see all positions: every sixth.
const GEMMA_PATTERN: usize = 6;
/// Layers of Gemma 3 27B, which alone scales scores by the hidden width; its files do not say so.
const GEMMA_27B_LAYERS: usize = 62;

macro_rules! field_names {
    ($architecture:literal) => {
        FieldNames {
            vocab_size: concat!($architecture, ".vocab_size"),
            hidden_size: concat!($architecture, ".embedding_length"),
            intermediate_size: concat!($architecture, ".feed_forward_length"),
            layers: concat!($architecture, ".block_count"),
            heads: concat!($architecture, ".attention.head_count"),
            kv_heads: concat!($architecture, ".attention.head_count_kv"),
            head_dim: concat!($architecture, ".attention.key_length"),
            rotary_dim: concat!($architecture, ".rope.dimension_count"),
            sliding_window: concat!($architecture, ".attention.sliding_window"),
            experts: concat!($architecture, ".expert_count"),
            experts_per_token: concat!($architecture, ".expert_used_count"),
            expert_width: concat!($architecture, ".expert_feed_forward_length"),
            max_position_embeddings: concat!($architecture, ".context_length"),
            rms_norm_eps: concat!($architecture, ".attention.layer_norm_rms_epsilon"),
            rope_theta: concat!($architecture, ".rope.freq_base"),
            bos_token_id: "tokenizer.ggml.bos_token_id",
            eos_token_ids: "tokenizer.ggml.eos_token_id",
        }
    };
}

/// `general.architecture`, what family it is, and what its files call their fields.
struct Architecture {
    name: &'static str,
    family: Family,
    names: FieldNames,
}

const ARCHITECTURES: [Architecture; 7] = [
    // Mistral and Mixtral too.
    Architecture { name: "llama", family: Family::Llama, names: field_names!("llama") },
    Architecture { name: "qwen2", family: Family::Qwen2, names: field_names!("qwen2") },
    Architecture { name: "qwen3", family: Family::Qwen3, names: field_names!("qwen3") },
    Architecture { name: "qwen3moe", family: Family::Qwen3Moe, names: field_names!("qwen3moe") },
    Architecture { name: "granite", family: Family::Granite, names: field_names!("granite") },
    Architecture { name: "gemma3", family: Family::Gemma3, names: field_names!("gemma3") },
    Architecture { name: "phi3", family: Family::Phi3, names: field_names!("phi3") },
];

/// Whether a tensor is part of the config.
pub(crate) fn is_config(tensor: &str) -> bool {
    ROPE_DIVISORS.contains(&tensor)
}

/// The model that a file's metadata and tensors describe.
pub(crate) fn model(
    file: &MappedFile,
    metadata: &Metadata,
    tensors: &[StoredTensor],
) -> Result<ModelConfig, CheckpointError> {
    let architecture = architecture(metadata)?;
    let model = Reader { file, metadata, tensors, architecture }.model()?;
    model.validate(file.path(), &architecture.names)?;
    Ok(model)
}

fn architecture(metadata: &Metadata) -> Result<&'static Architecture, CheckpointError> {
    let key = "general.architecture";
    let name = metadata.needed(key, metadata.text(key)?)?;
    let known = ARCHITECTURES.iter().find(|architecture| architecture.name == name);
    known.ok_or_else(|| {
        let names = ARCHITECTURES.iter().map(|known| known.name).collect::<Vec<_>>().join(", ");
        metadata.refuse(key, &format!("one of: {names}"), format!("{name:?}"))
    })
}

struct Reader<'a> {
    file: &'a MappedFile,
    metadata: &'a Metadata,
    tensors: &'a [StoredTensor],
    architecture: &'static Architecture,
}

impl Reader<'_> {
    fn model(&self) -> Result<ModelConfig, CheckpointError> {
        let (metadata, names) = (self.metadata, &self.architecture.names);
        let size = |key: &str| metadata.needed(key, metadata.size(key)?);
        let (hidden_size, heads) = (size(names.hidden_size)?, size(names.heads)?);
        let layers = size(names.layers)?;
        if layers > MOST_LAYERS {
            let expected = format!("1 to {MOST_LAYERS}");
            return Err(metadata.refuse(names.layers, &expected, layers.to_string()));
        }
        let head_dim = self.head_dim(hidden_size, heads)?;
        let rotary_dim = self.rotary_dim(head_dim)?;
        let vocab_size = match metadata.size(names.vocab_size)? {
            Some(size) => size,
            None => {
                let rows = self.tensor("token_embd.weight").map(|tensor| tensor.shape[0]);
                metadata.needed(names.vocab_size, rows)?
            }
        };
        let eps = metadata.needed(names.rms_norm_eps, metadata.number(names.rms_norm_eps)?)?;
        let intermediate_size = size(names.intermediate_size)?;
        let max_position_embeddings = size(names.max_position_embeddings)?;
        let experts = self.experts(intermediate_size)?;
        let layer = self.layer(layers)?;
        Ok(ModelConfig {
            family: match self.architecture.family {
                Family::Llama if experts.is_some() => Family::Mixtral,
                Family::Llama if layer.sliding.is_some() => Family::Mistral,
                family => family,
            },
            vocab_size,
            hidden_size,
            intermediate_size,
            layers,
            heads,
            kv_heads: metadata.size(names.kv_heads)?.unwrap_or(heads),
            head_dim,
            rotary_dim,
            max_position_embeddings,
            rms_norm_eps: eps as f32,
            rope_theta: metadata.number(names.rope_theta)?.unwrap_or(DEFAULT_ROPE_THETA),
            rope_scaling: self.rope_scaling(rotary_dim)?,
            layer,
            experts,
            multipliers: self.multipliers(hidden_size, heads, layers)?,
            tied_embeddings: self.tensor("output.weight").is_none(),
            bos_token_id: metadata.id(names.bos_token_id)?,
            eos_token_ids: eos_token_ids(metadata)?,
        })
    }

    fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// A key of the architecture.
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    fn factor(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        let key = self.key(key);
        match self.metadata.number(&key)? {
            Some(factor) if !(factor.is_finite() && factor > 0.0) => {
                Err(self.metadata.refuse(&key, "a positive number", factor.to_string()))
            }
            factor => Ok(factor),
        }
    }

    fn head_dim(&self, hidden_size: usize, heads: usize) -> Result<usize, CheckpointError> {
        let (metadata, names) = (self.metadata, &self.architecture.names);
        let head_dim = match metadata.size(names.head_dim)? {
            Some(width) => width,
            None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                let expected = format!("a divisor of {} ({hidden_size})", names.hidden_size);
                return Err(metadata.refuse(names.heads, &expected, heads.to_string()));
            }
        };
        let key = self.key("attention.value_length");
        match metadata.size(&key)?.filter(|&width| width != head_dim) {
            None => Ok(head_dim),
            Some(width) => {
                let expected = format!("the head's width ({head_dim})");
                Err(metadata.refuse(&key, &expected, width.to_string()))
            }
        }
    }

    fn rotary_dim(&self, head_dim: usize) -> Result<usize, CheckpointError> {
        let key = self.architecture.names.rotary_dim;
        match self.metadata.size(key)? {
            Some(width) if width != head_dim && self.architecture.family != Family::Phi3 => {
                let expected = format!("the head's width ({head_dim})");
                Err(self.metadata.refuse(key, &expected, width.to_string()))
            }
            width => Ok(width.unwrap_or(head_dim)),
        }
    }

    /// Biases are where the file has them; the strict check wants them in every layer then.
    fn layer(&self, layers: usize) -> Result<LayerConfig, CheckpointError> {
        let has = |name: &str| self.tensor(&format!("blk.0.{name}.bias")).is_some();
        let family = self.architecture.family;
        let gemma = family == Family::Gemma3;
        Ok(LayerConfig {
            activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
            qkv_bias: family == Family::Qwen2 || has("attn_q") || has("attn_qkv"),
            output_bias: has("attn_output"),
            mlp_bias: has("ffn_up"),
            qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3),
            post_norms: gemma,
            // The converter has added the one.
            norms_add_one: false,
            sliding: self.sliding(layers)?,
        })
    }

    fn sliding(&self, layers: usize) -> Result<Option<SlidingWindow>, CheckpointError> {
        let key = self.architecture.names.sliding_window;
        let window = self.metadata.size(key)?.filter(|&window| window > 0);
        match self.architecture.family {
            Family::Gemma3 => {
                let window = self.metadata.needed(key, window)?;
                let theta = self.factor("rope.freq_base_swa")?.unwrap_or(DEFAULT_ROPE_THETA);
                let slides = (1..=layers).map(|layer| !layer.is_multiple_of(GEMMA_PATTERN));
                let (layers, rope_theta) = (slides.collect(), Some(theta));
                Ok(Some(SlidingWindow { window, layers, rope_theta }))
            }
            _ => Ok(window.map(|window| SlidingWindow {
                window,
                layers: vec![true; layers],
                rope_theta: None,
            })),
        }
    }

    fn experts(&self, mlp: usize) -> Result<Option<ExpertConfig>, CheckpointError> {
        let (metadata, names) = (self.metadata, &self.architecture.names);
        let count = metadata.size(names.experts)?.unwrap_or(0);
        let expected = match self.architecture.family {
            Family::Llama | Family::Qwen3Moe if count > 0 => {
                let per_token = metadata.size(names.experts_per_token)?;
                return Ok(Some(ExpertConfig {
                    count,
                    per_token: metadata.needed(names.experts_per_token, per_token)?,
                    width: metadata.size(names.expert_width)?.unwrap_or(mlp),
                    // As llama.cpp does for both.
                    renormalise: true,
                    dense_layers: Vec::new(),
                }));
            }
            Family::Qwen3Moe => "at least 1",
            _ if count > 0 => "0 (this family has no mixtures of experts)",
            _ => return Ok(None),
        };
        Err(metadata.refuse(names.experts, expected, count.to_string()))
    }

    fn multipliers(
        &self,
        hidden_size: usize,
        heads: usize,
        layers: usize,
    ) -> Result<Multipliers, CheckpointError> {
        let one = |factor: Option<f64>| factor.unwrap_or(1.0) as f32;
        let attention = self.factor("attention.scale")?.map(|scale| scale as f32);
        match self.architecture.family {
            Family::Granite => Ok(Multipliers {
                embedding: one(self.factor("embedding_scale")?),
                attention,
                residual: one(self.factor("residual_scale")?),
                logits: one(self.factor("logit_scale")?.map(f64::recip)),
            }),
            Family::Gemma3 => {
                let by_hidden = || (hidden_size as f64 / heads.max(1) as f64).sqrt().recip() as f32;
                let by_layers = (layers == GEMMA_27B_LAYERS).then(by_hidden);
                let embedding = (hidden_size as f64).sqrt() as f32;
                let attention = attention.or(by_layers);
                Ok(Multipliers { embedding, attention, ..Multipliers::default() })
            }
            _ => Ok(Multipliers { attention, ..Multipliers::default() }),
        }
    }

    fn rope_scaling(&self, rotary_dim: usize) -> Result<RopeScaling, CheckpointError> {
        let [freqs, short, long] = ROPE_DIVISORS.map(|name| self.tensor(name));
        let key = self.key("rope.scaling.type");
        let scaling = match (self.metadata.text(&key)?, short, long) {
            (None | Some("none" | "longrope"), Some(short), Some(long)) => {
                return self.longrope(short, long, rotary_dim);
            }
            (None | Some("none"), None, None) => RopeScaling::None,
            (Some("linear"), None, None) => {
                let factor = self.factor("rope.scaling.factor")?;
                let name = self.key("rope.scaling.factor");
                RopeScaling::Linear { factor: self.metadata.needed(&name, factor)? }
            }
            (kind, ..) => {
                let expected = "one of: none, linear, or longrope with both lists of factors \
                     (others are not supported yet)";
                let found = kind.map_or("nothing".to_owned(), |kind| format!("{kind:?}"));
                return Err(self.metadata.refuse(&key, expected, found));
            }
        };
        let Some(tensor) = freqs else { return Ok(scaling) };
        if scaling != RopeScaling::None {
            let expected = format!("no frequency divisors beside {key}");
            return Err(self.refuse(tensor, expected, "both".to_owned()));
        }
        Ok(RopeScaling::PerFrequency { divisors: self.divisors(tensor, rotary_dim)? })
    }

    fn longrope(
        &self,
        short: &StoredTensor,
        long: &StoredTensor,
        rotary_dim: usize,
    ) -> Result<RopeScaling, CheckpointError> {
        let key = self.key("rope.scaling.original_context_length");
        let context = self.metadata.needed(&key, self.metadata.size(&key)?)?;
        let factors = |tensor| {
            let divisors = self.divisors(tensor, rotary_dim)?;
            Ok(divisors.into_iter().map(f64::from).collect())
        };
        Ok(RopeScaling::LongRope {
            short_factors: factors(short)?,
            long_factors: factors(long)?,
            original_max_position_embeddings: context,
            attention_factor: self.factor("rope.scaling.attn_factor")?.unwrap_or(1.0),
        })
    }

    /// A positive number for each frequency.
    fn divisors(
        &self,
        tensor: &StoredTensor,
        rotary_dim: usize,
    ) -> Result<Vec<f32>, CheckpointError> {
        let count = rotary_dim / 2;
        if tensor.shape != [count] {
            let found = format!("shape {:?}", tensor.shape);
            return Err(self.refuse(tensor, format!("shape [{count}]"), found));
        }
        let mut values = vec![0f32; count];
        let bytes = &self.file.bytes()[tensor.offset..tensor.offset + tensor.bytes];
        tensor.dtype.dequantise(bytes, &mut values);
        match values.iter().find(|value| !(value.is_finite() && **value > 0.0)) {
            Some(value) => {
                Err(self.refuse(tensor, "positive divisors".to_owned(), value.to_string()))
            }
            None => Ok(values),
        }
    }

    fn refuse(&self, tensor: &StoredTensor, expected: String, found: String) -> CheckpointError {
        let (path, tensor) = (self.file.path().to_owned(), tensor.name.clone());
        CheckpointError::Tensor { path, tensor, expected, found }
    }
}

/// Ends of a document, a turn and a message (a tool call).
fn eos_token_ids(metadata: &Metadata) -> Result<Vec<u32>, CheckpointError> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(metadata.id(&format!("tokenizer.ggml.{key}"))?);
    }
    if metadata.id("tokenizer.ggml.eot_token_id")?.is_none() {
        let tokens = metadata.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
        let ends = tokens.iter().enumerate();
        let ends = ends.filter(|(_, token)| TURN_ENDS.contains(&token.as_str()));
        ids.extend(ends.filter_map(|(id, _)| u32::try_from(id).ok()));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
