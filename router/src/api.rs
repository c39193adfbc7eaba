//! What a client can ask and what it gets, free of any transport. HTTP and gRPC convert to and
//! from these types and nothing else.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use futures::{future::BoxFuture, stream::BoxStream};
use trireme_grammar::Grammar;

use crate::{chat_syntax::ChatSyntax, error::RouterError, reasoning::Thought};

/// What transports call. [`crate::front::Front`] is the real one; tests script another.
pub trait Generator: Send + Sync + 'static {
    /// Validates, tokenizes and admits. Errors come before any event, so a transport can still
    /// choose its status.
    fn generate(&self, request: GenerateRequest) -> BoxFuture<'_, Result<Generation, RouterError>>;
    /// Text to ids. Text that spells a special token is read as that token.
    fn encode(
        &self,
        text: String,
        add_special_tokens: bool,
    ) -> BoxFuture<'_, Result<Vec<u32>, RouterError>>;
    /// A prompt to its tokens as generation would read it, each with its place in the text.
    /// Special tokens are added as for [`Parameters::add_special_tokens`].
    fn tokenize(
        &self,
        prompt: Prompt,
        add_special_tokens: Option<bool>,
    ) -> BoxFuture<'_, Result<Tokenized, RouterError>>;
    /// Ids to text, special tokens included.
    fn decode(&self, ids: Vec<u32>) -> BoxFuture<'_, Result<String, RouterError>>;
    /// A conversation to the text of its prompt.
    fn render(&self, conversation: Arc<Conversation>)
    -> BoxFuture<'_, Result<String, RouterError>>;
    /// A conversation to the ids of its prompt. Only its template writes special tokens.
    fn encode_conversation(
        &self,
        conversation: Arc<Conversation>,
    ) -> BoxFuture<'_, Result<Vec<u32>, RouterError>>;
    /// What is served. Figures that the shards tell are 0 until the first time they are ready.
    fn model(&self) -> ServedModel;
    /// How the model writes calls and thought.
    fn chat_syntax(&self) -> ChatSyntax {
        ChatSyntax::default()
    }
    fn readiness(&self) -> Readiness;
    /// The tokenizer's special tokens and chat template, in the keys of `tokenizer_config.json`;
    /// at least `eos_token`. `None` when it is not known.
    fn tokenizer_info(&self) -> Option<serde_json::Value> {
        None
    }
    /// Forgets cached prefixes, so that the next request runs cold.
    fn reset_prefix_cache(&self) -> BoxFuture<'_, Result<(), RouterError>> {
        let message = "resetting the prefix cache is not supported".to_owned();
        let error = RouterError::Unsupported { field: "reset_prefix_cache", message };
        Box::pin(std::future::ready(Err(error)))
    }
}

/// Whether a request would be run now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// Not yet; the text says how far it is.
    Starting(String),
    /// The shards are gone and are being replaced; requests wait in the queue.
    Lost(String),
    /// Refuses new requests, finishes running ones.
    Draining,
}

/// One generation. Parsed from the wire, not yet checked against the model.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    pub request_id: String,
    pub prompt: Prompt,
    pub parameters: Parameters,
}

#[derive(Clone, Debug)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    /// Rendered by the chat template.
    Conversation(Arc<Conversation>),
}

/// A text and its tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokenized {
    pub text: String,
    pub pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub id: u32,
    /// As the vocabulary spells it.
    pub token: String,
    /// The characters of the text that it stands for; empty for a token that was added.
    pub chars: Range<usize>,
}

/// A conversation, as `apply_chat_template` of Hugging Face takes it.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    pub messages: Vec<serde_json::Value>,
    pub tools: Option<serde_json::Value>,
    pub documents: Option<serde_json::Value>,
    /// Further template variables (`chat_template_kwargs`).
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Ends the prompt where the assistant's next turn begins.
    pub add_generation_prompt: bool,
    /// Ends the prompt inside the last message, to be continued.
    pub continue_final_message: bool,
}

impl Conversation {
    /// The assistant is to answer `messages`.
    pub fn to_answer(messages: Vec<serde_json::Value>) -> Self {
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }
}

/// `None` means "as the model server does by default": greedy, unpenalised, up to the context's end.
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    pub max_new_tokens: Option<u32>,
    pub min_new_tokens: u32,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub typical_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub logit_bias: BTreeMap<u32, f32>,
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub include_stop: bool,
    pub ignore_eos: bool,
    pub logprobs: bool,
    pub top_logprobs: u32,
    pub priority: i32,
    /// Keep only the last so many prompt tokens (TGI's `truncate`).
    pub truncate: Option<u32>,
    pub skip_special_tokens: Option<bool>,
    pub add_special_tokens: Option<bool>,
    /// Score the prompt's own tokens; then `max_new_tokens` may be 0.
    pub prompt_scoring: Option<PromptScoring>,
    pub constraint: Option<Constraint>,
}

/// Which prompt tokens are scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptScoring {
    /// The likeliest tokens to tell beside each.
    pub top_logprobs: u32,
    /// Tokens before it are not scored, and may come from the prefix cache. The first token never is.
    pub start: u32,
}

/// What the answer must look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constraint {
    /// The client's name for it.
    pub field: &'static str,
    pub grammar: Arc<Grammar>,
    /// What may be thought before it.
    pub thought: Option<Box<Thought>>,
}

/// An admitted request: what is known before the first token, and the events to come.
/// Dropping it cancels the sequence within one step.
pub struct Generation {
    pub request_id: String,
    pub prompt_ids: Arc<[u32]>,
    /// What the seed was, given or made up.
    pub seed: u64,
    pub events: BoxStream<'static, GenerateEvent>,
}

/// `Prompt` first where the prompt is scored, `Token` for every token, then exactly one `Finished` or `Failed`. Once the last token has been
/// read, `Finished` is there without a wait.
#[derive(Debug)]
pub enum GenerateEvent {
    /// Every token of the prompt.
    Prompt(Vec<PromptToken>),
    Token(Token),
    Finished(Finished),
    Failed(RouterError),
}

#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    /// New text; empty while a character or a possible stop string is incomplete. The texts of all
    /// tokens and of `Finished::rest` concatenate to `Finished::text`.
    pub text: String,
    /// The token's own piece, for logprob tables.
    pub piece: String,
    /// The piece's bytes.
    pub bytes: Vec<u8>,
    pub special: bool,
    pub logprob: Option<f32>,
    pub top: Vec<TopToken>,
}

/// A token of a prompt that is scored.
#[derive(Clone, Debug)]
pub struct PromptToken {
    pub id: u32,
    /// Its part of the prompt's text, special tokens included; empty while a character is incomplete.
    pub text: String,
    /// The token's own piece.
    pub piece: String,
    pub special: bool,
    /// `None` for the first token and those before the start of scoring.
    pub score: Option<PromptScore>,
}

/// How likely a token of the prompt was, by the raw model.
#[derive(Clone, Debug)]
pub struct PromptScore {
    /// Natural log.
    pub logprob: f32,
    /// Its place among all tokens, from 1.
    pub rank: u32,
    /// The likeliest tokens, best first; its own among them if it is one.
    pub top: Vec<TopToken>,
}

#[derive(Clone, Debug)]
pub struct TopToken {
    pub id: u32,
    pub piece: String,
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

#[derive(Clone, Debug)]
pub struct Finished {
    pub reason: FinishReason,
    /// The whole answer, trimmed of the stop string unless it was asked for.
    pub text: String,
    /// Text that was held back and belongs to no later token.
    pub rest: String,
    /// The stop string, if one ended it.
    pub stop: Option<StopCause>,
    pub usage: Usage,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    EndOfSequence(u32),
    TokenId(u32),
    Text(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    Length,
    Stop,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub cached_tokens: u32,
}

impl Readiness {
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready)
    }
}

/// What the served model is; fixed once the router is ready.
#[derive(Clone, Debug)]
pub struct ServedModel {
    pub name: String,
    pub created_s: u64,
    pub tp: u32,
    pub pp: u32,
    pub dtype: String,
    pub max_model_len: u32,
    pub max_sequences: u32,
    pub max_batch_tokens: u32,
    pub kv_blocks: u32,
    pub kv_block_tokens: u32,
}
