//! Tensors that exporters wrote out though they follow from the config: no weights.

/// Whether `name` is a buffer of one of the known exporters: rotary frequencies (Hugging Face until
/// 4.31, llama.cpp, Meta), masks and KV caches (torchchat, llama2.c).
pub(crate) fn is_buffer(name: &str) -> bool {
    const ENDINGS: [&str; 6] = [
        ".rotary_emb.inv_freq",
        ".attn_rot_embd.weight",
        "rope.freqs",
        ".k_cache",
        ".v_cache",
        ".attention.mask",
    ];
    let name = name.strip_prefix("_orig_mod.").unwrap_or(name);
    let top = name.strip_prefix("model.").unwrap_or(name);
    ENDINGS.iter().any(|ending| name.ends_with(ending))
        || matches!(top, "freqs_cis" | "freqs_cos" | "freqs_sin" | "causal_mask" | "mask")
}
