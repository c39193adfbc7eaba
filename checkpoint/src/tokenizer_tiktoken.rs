//! Llama 3's `tokenizer.model`, in tiktoken's format: a line for each token with its bytes in
//! base64 and its rank. How text is cut and which special tokens follow is not in the file; both
//! are Llama 3's (`llama3/tokenizer.py` of meta-llama), the only models that come this way.

use std::path::Path;

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use tokenizers::AddedToken;

use crate::{
    CheckpointError,
    tokenizer_bytes::{LLAMA3, from_ranks},
    tokenizer_file::TokenizerFile,
    tokenizer_vocabulary::{frame, refuse},
};

const SPECIAL_TOKENS: usize = 256;
const BEGIN: &str = "<|begin_of_text|>";
const END: &str = "<|end_of_text|>";
const END_OF_TURN: &str = "<|eot_id|>";

/// A conversation in the tokens above; this format has no room for a template of its own.
const TEMPLATE: &str = "{{- bos_token }}\
    {%- for message in messages %}\
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' \
        + message['content'] | trim + '<|eot_id|>' }}\
    {%- endfor %}\
    {%- if add_generation_prompt %}\
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\
    {%- endif %}";

/// Whether a file begins as this format does.
pub(crate) fn is_tiktoken(text: &str) -> bool {
    text.lines().next().is_some_and(|line| entry(line).is_some())
}

fn entry(line: &str) -> Option<(Vec<u8>, usize)> {
    let (token, rank) = line.split_once(' ')?;
    Some((BASE64.decode(token).ok()?, rank.trim_end().parse().ok()?))
}

/// The tokenizer in the text of a file.
pub(crate) fn read(path: &Path, text: &str) -> Result<TokenizerFile, CheckpointError> {
    let mut tokens = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        match entry(line) {
            Some((token, rank)) if rank == tokens.len() => tokens.push(token),
            _ => {
                return Err(CheckpointError::Malformed {
                    path: path.to_owned(),
                    what: format!("line {}", number + 1),
                    expected: format!("a token in base64 and its rank {}", tokens.len()),
                    found: format!("{:?}", line.chars().take(80).collect::<String>()),
                });
            }
        }
    }
    let mut tokenizer = from_ranks(path, &tokens, &[], LLAMA3)?;
    let special = special_tokens();
    let added = special.iter().map(|token| AddedToken::from(token.clone(), true));
    tokenizer.add_tokens(added).map_err(|error| refuse(path, error))?;
    let begin = (BEGIN.to_owned(), tokens.len() as u32);
    let frame = frame(Some(&begin), None).map_err(|error| refuse(path, error))?;
    tokenizer.with_post_processor(Some(frame));
    Ok(TokenizerFile {
        bos_token: Some(BEGIN.to_owned()),
        eos_token: Some(END.to_owned()),
        end_tokens: vec![END_OF_TURN.to_owned()],
        chat_template: Some(TEMPLATE.to_owned()),
        ..TokenizerFile::new(path, tokenizer)
    })
}

/// In order of id, after the ranks.
fn special_tokens() -> Vec<String> {
    let named = [
        (0, BEGIN),
        (1, END),
        (6, "<|start_header_id|>"),
        (7, "<|end_header_id|>"),
        (9, END_OF_TURN),
    ];
    let mut reserved = (0..).map(|number| format!("<|reserved_special_token_{number}|>"));
    let token = |place| match named.iter().find(|(at, _)| *at == place) {
        Some((_, name)) => (*name).to_owned(),
        None => reserved.next().unwrap_or_default(),
    };
    (0..SPECIAL_TOKENS).map(token).collect()
}
