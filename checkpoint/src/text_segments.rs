//! Prompts of which it is known what is text and what is a special token, whatever they spell.
//!
//! A tokenizer finds its special tokens by their spelling, so a text that spells one would become
//! one. To encode such a prompt as a whole (cutting it would change the tokens at the cuts), each
//! special token that is meant gets a spelling that the text does not hold, and the tokens that
//! are not meant get none. What spells one in a conversation is encoded apart from its neighbours,
//! as transformers does (`sanitize_control_tokens`).

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use tokenizers::{
    AddedToken, AddedVocabulary, Model, OffsetType, PreTokenizer, SplitDelimiterBehavior, Tokenizer,
};

use crate::{CheckpointError, TextSources};

/// Private-use characters, none of which has a meaning that a text could need.
const LEADS: std::ops::RangeInclusive<char> = '\u{100000}'..='\u{10FFFD}';

/// A token and the characters that it stands for.
pub type Placed = (u32, Range<usize>);

/// A stretch of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// A token of [`TextSources::control_tokens`] that is meant.
    Special(String),
    /// Text, whatever it spells.
    Text(String),
}

impl TextSources {
    /// Token ids of a prompt, nothing added around it. The ids are those of [`Self::encode`] for
    /// the same text as long as no text segment spells a control token.
    ///
    /// # Errors
    /// The text holds every character that could set special tokens apart.
    pub fn encode_segments(&self, segments: &[Segment]) -> Result<Vec<u32>, CheckpointError> {
        let placed = self.placed(segments, OffsetType::None)?;
        Ok(placed.into_iter().map(|(id, _)| id).collect())
    }

    /// As [`Self::encode_segments`], each token with the characters of the segments' text that it
    /// stands for.
    pub fn encode_segments_with_offsets(
        &self,
        segments: &[Segment],
    ) -> Result<Vec<Placed>, CheckpointError> {
        self.placed(segments, OffsetType::Char)
    }

    fn placed(
        &self,
        segments: &[Segment],
        offsets: OffsetType,
    ) -> Result<Vec<Placed>, CheckpointError> {
        let parts = parts_of(segments);
        let mut apart = self.control_tokens();
        apart.retain(|token| parts.iter().any(|(text, special)| !special && text.contains(token)));
        // Of two that begin alike, the longer one is meant.
        apart.sort_by_key(|token| std::cmp::Reverse(token.len()));
        self.encode_parts_with_offsets(&parts, offsets, &apart)
            .map_err(|error| not_encoded(&parts, &error))
    }

    /// Parts are `(content, is a special token)`.
    pub(crate) fn encode_parts(
        &self,
        parts: &[(&str, bool)],
    ) -> Result<Vec<u32>, tokenizers::Error> {
        let spelled = Spelled::new(parts)?;
        let encoding = spelled.encode(self, OffsetType::None, &[])?;
        Ok(encoding.into_iter().map(|(id, _)| id).collect())
    }

    fn encode_parts_with_offsets(
        &self,
        parts: &[(&str, bool)],
        offsets: OffsetType,
        apart: &[String],
    ) -> Result<Vec<Placed>, tokenizers::Error> {
        let spelled = Spelled::new(parts)?;
        let encoding = spelled.encode(self, offsets, apart)?;
        let meant = |at: Range<usize>| spelled.meant_char(at.start)..spelled.meant_char(at.end);
        Ok(encoding.into_iter().map(|(id, place)| (id, meant(place))).collect())
    }
}

fn parts_of(segments: &[Segment]) -> Vec<(&str, bool)> {
    let parts = segments.iter().map(|segment| match segment {
        Segment::Special(token) => (token.as_str(), true),
        Segment::Text(text) => (text.as_str(), false),
    });
    parts.collect()
}

fn not_encoded(parts: &[(&str, bool)], error: &tokenizers::Error) -> CheckpointError {
    let bytes = parts.iter().map(|(text, _)| text.len()).sum();
    CheckpointError::Encode { bytes, detail: error.to_string() }
}

/// Parts as one text, in which each special token has a spelling of its own.
struct Spelled<'a> {
    lead: char,
    spellings: HashMap<&'a str, String>,
    text: String,
    /// After each special token: the characters so far, as spelled and as meant.
    places: Vec<(usize, usize)>,
}

impl<'a> Spelled<'a> {
    fn new(parts: &[(&'a str, bool)]) -> Result<Self, tokenizers::Error> {
        let lead = free_lead(parts.iter().map(|(content, _)| *content))?;
        let mut spelled =
            Self { lead, spellings: HashMap::new(), text: String::new(), places: Vec::new() };
        let (mut spelled_chars, mut meant_chars) = (0, 0);
        for &(content, is_special) in parts {
            let chars = content.chars().count();
            meant_chars += chars;
            if !is_special {
                spelled_chars += chars;
                spelled.text.push_str(content);
                continue;
            }
            let number = spelled.spellings.len();
            let spelling = || format!("{lead}{number}{lead}");
            let spelling = spelled.spellings.entry(content).or_insert_with(spelling);
            spelled_chars += spelling.chars().count();
            spelled.text.push_str(spelling);
            spelled.places.push((spelled_chars, meant_chars));
        }
        Ok(spelled)
    }

    /// Ids, with places in the spelled text.
    fn encode(
        &self,
        sources: &TextSources,
        offsets: OffsetType,
        apart: &[String],
    ) -> Result<Vec<Placed>, tokenizers::Error> {
        let added = AddedTokens::new(sources, self.lead, &self.spellings)?;
        added.encode(&sources.tokenizer, &self.text, offsets, apart)
    }

    /// Where a character of the spelled text stands in the meant one. No token cuts a special one.
    fn meant_char(&self, char: usize) -> usize {
        let before = self.places.partition_point(|&(spelled, _)| spelled <= char);
        let (spelled, meant) = before.checked_sub(1).map_or((0, 0), |last| self.places[last]);
        meant + (char - spelled)
    }
}

/// A character that no text holds.
fn free_lead<'a>(texts: impl Iterator<Item = &'a str>) -> Result<char, tokenizers::Error> {
    let characters = texts.flat_map(str::chars).filter(|character| LEADS.contains(character));
    let held: HashSet<char> = characters.collect();
    let free = LEADS.into_iter().find(|lead| !held.contains(lead));
    free.ok_or_else(|| "it holds all private-use characters of Unicode's last plane".into())
}

/// Tokens that are found in a text before it is cut, and the ids they stand for.
struct AddedTokens {
    vocabulary: AddedVocabulary,
    ids: HashMap<u32, u32>,
}

impl AddedTokens {
    /// The added tokens that are not control tokens, and control tokens under other spellings.
    fn new(
        sources: &TextSources,
        lead: char,
        spellings: &HashMap<&str, String>,
    ) -> Result<Self, tokenizers::Error> {
        let tokenizer = &sources.tokenizer;
        let control: HashSet<String> = sources.control_tokens().into_iter().collect();
        let mut tokens: Vec<(u32, AddedToken)> = Vec::new();
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if let Some(spelling) = spellings.get(token.content.as_str()) {
                let token = AddedToken { content: spelling.clone(), ..token };
                tokens.push((id, token.normalized(false).special(false)));
            } else if !token.special && !control.contains(&token.content) {
                tokens.push((id, token));
            }
        }
        tokens.sort_by_key(|(id, _)| *id);
        let mut vocabulary = AddedVocabulary::new();
        let (model, normalizer) = (tokenizer.get_model(), tokenizer.get_normalizer());
        // New ids count on from the number of the model's tokens, which lies below its last id
        // where the ids have gaps.
        let gaps = sources.model_ids.saturating_sub(model.get_vocab_size() as u32);
        let filler = |number| AddedToken::from(format!("{lead}gap{number}{lead}"), false);
        let fillers = (0..gaps).map(|number| filler(number).normalized(false));
        vocabulary.add_tokens(fillers, model, normalizer)?;
        vocabulary.add_tokens(tokens.iter().map(|(_, token)| token.clone()), model, normalizer)?;
        let ids = tokens
            .iter()
            .filter_map(|(id, token)| Some((*vocabulary.get_vocab().get(&token.content)?, *id)));
        Ok(Self { ids: ids.collect(), vocabulary })
    }

    /// As the tokenizer itself encodes, but for the added tokens it looks for.
    fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        offsets: OffsetType,
        apart: &[String],
    ) -> Result<Vec<Placed>, tokenizers::Error> {
        let mut pieces = self.vocabulary.extract_and_normalize(tokenizer.get_normalizer(), text);
        for token in apart {
            pieces
                .split(|_, piece| piece.split(token.as_str(), SplitDelimiterBehavior::Isolated))?;
        }
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        tokenizer.get_model().tokenize_in_pretokenized(&mut pieces, None)?;
        let encoding = pieces.into_encoding(None, 0, offsets)?;
        let meant = |id: &u32| self.ids.get(id).copied().unwrap_or(*id);
        let places = encoding.get_offsets().iter().map(|&(start, stop)| start..stop);
        Ok(encoding.get_ids().iter().map(meant).zip(places).collect())
    }
}

#[cfg(test)]
#[path = "text_segments_tests.rs"]
mod tests;
