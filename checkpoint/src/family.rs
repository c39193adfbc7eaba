//! The model families, and what each is called where.

use serde::Serialize;

/// Architecture family: what a layer is made of, and which fields of the config say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Llama 1 to 3, CodeLlama, TinyLlama, SmolLM and what else is trained on this architecture.
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Granite,
    /// The text model alone.
    Gemma3,
    Phi3,
}

impl Family {
    pub const ALL: [Self; 9] = [
        Self::Llama,
        Self::Mistral,
        Self::Mixtral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Granite,
        Self::Gemma3,
        Self::Phi3,
    ];

    /// The class in `architectures` of config.json.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Granite => "GraniteForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
        }
    }

    /// `model_type` of config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Mixtral => "mixtral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Granite => "granite",
            Self::Gemma3 => "gemma3_text",
            Self::Phi3 => "phi3",
        }
    }

    /// The family whose `name` is `found`.
    pub(crate) fn named(found: &str, name: impl Fn(Self) -> &'static str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| name(*family) == found)
    }

    /// All names, for messages.
    pub(crate) fn list(name: impl Fn(Self) -> &'static str) -> String {
        Self::ALL.map(name).join(", ")
    }
}
