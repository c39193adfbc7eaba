//! What each token id is on its own: its piece, its bytes, and whether it is special.

use std::{collections::HashMap, sync::LazyLock};

use serde_json::json;
use tokenizers::{DecoderWrapper, Tokenizer};

/// One id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The bytes that the id adds to a text; a character may need several ids.
    pub bytes: Box<[u8]>,
    /// Taken out of an answer unless asked for.
    pub special: bool,
}

/// How the text of several ids comes from the bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joining {
    /// Bytes in a row, as in byte-level BPE.
    Bytes,
    /// As sentencepiece has it: bytes in a row, where each byte that is no part of a character is
    /// replaced for itself.
    Pieces { drops_first_space: bool },
    /// Only the tokenizer knows.
    Unknown,
}

/// Every id of a tokenizer, read once.
pub struct Vocabulary {
    entries: Vec<Entry>,
    joining: Joining,
}

/// GPT-2's printable stand-ins for bytes (`bytes_to_unicode` in OpenAI's encoder.py): visible
/// Latin-1 stands for itself, the rest is counted up from U+0100.
static BYTE_OF_CHAR: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let hidden = (0..=255_u8).filter(|byte| !visible(byte));
    let counted = hidden.zip('\u{100}'..).map(|(byte, stand_in)| (stand_in, byte));
    (0..=255_u8).filter(visible).map(|byte| (byte as char, byte)).chain(counted).collect()
});

impl Vocabulary {
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let joining = tokenizer.get_decoder().map_or(Joining::Unknown, Joining::of);
        let added = tokenizer.get_added_vocabulary();
        let known = tokenizer.get_vocab(true);
        let size = known.values().max().map_or(0, |id| *id as usize + 1);
        let mut entries = vec![Entry::default(); size];
        for (token, id) in known {
            let special = added.is_special_token(&token);
            let is_added = added.simple_id_to_token(id).is_some();
            let spaced = |token: &str| token.replace('▁', " ").into_bytes();
            let bytes = match joining {
                Joining::Bytes => byte_level_bytes(&token),
                Joining::Pieces { .. } => spelled_byte(&token).unwrap_or_else(|| spaced(&token)),
                Joining::Unknown if is_added => token.into_bytes(),
                Joining::Unknown => spelled_byte(&token).unwrap_or_else(|| spaced(&token)),
            };
            entries[id as usize] = Entry { bytes: bytes.into(), special };
        }
        Self { entries, joining }
    }

    /// One more than the highest id.
    pub fn size(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Characters of the longest piece.
    pub fn longest_chars(&self) -> usize {
        let chars = |entry: &Entry| String::from_utf8_lossy(&entry.bytes).chars().count();
        self.entries.iter().map(chars).max().unwrap_or(0)
    }

    /// What grammars know of it.
    pub fn for_grammars(&self, eos_token_ids: &[u32]) -> trireme_grammar::Vocabulary {
        let tokens = self.entries.iter().map(|entry| (&*entry.bytes, entry.special));
        trireme_grammar::Vocabulary::new(tokens, eos_token_ids)
    }

    pub fn get(&self, id: u32) -> Option<&Entry> {
        self.entries.get(id as usize)
    }

    pub fn bytes(&self, id: u32) -> &[u8] {
        self.get(id).map_or(&[], |entry| &entry.bytes)
    }

    /// The bytes as text, where they are not a whole character with U+FFFD in their place.
    pub fn piece(&self, id: u32) -> String {
        String::from_utf8_lossy(self.bytes(id)).into_owned()
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.get(id).is_some_and(|entry| entry.special)
    }

    pub fn joining(&self) -> Joining {
        self.joining
    }
}

impl Joining {
    fn of(decoder: &DecoderWrapper) -> Self {
        if matches!(decoder, DecoderWrapper::ByteLevel(_)) {
            return Self::Bytes;
        }
        let steps = json!([
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]);
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let found = serde_json::to_value(decoder).unwrap_or_default();
        match (found["decoders"].as_array().map(Vec::as_slice), steps.as_array()) {
            (Some(found), Some(steps)) if found == steps => {
                Self::Pieces { drops_first_space: false }
            }
            (Some([found @ .., last]), Some(steps)) if found == steps && *last == strip => {
                Self::Pieces { drops_first_space: true }
            }
            _ => Self::Unknown,
        }
    }
}

/// As the ByteLevel decoder does: a token with a character that stands for no byte is itself.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> =
        token.chars().map(|character| BYTE_OF_CHAR.get(&character).copied()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// `<0xAB>`, as byte fallback spells it.
fn spelled_byte(token: &str) -> Option<Vec<u8>> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let byte = (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())??;
    Some(vec![byte])
}
