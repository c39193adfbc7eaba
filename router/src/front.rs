//! The real [`Generator`]: validation, tokenizer and dispatcher in a row.

use std::{sync::Arc, time::SystemTime};

use futures::{FutureExt, StreamExt, future::BoxFuture};
use tracing::{Instrument, Span, field};

use crate::{
    api::{
        Constraint, Conversation, GenerateRequest, Generation, Generator, Prompt, Readiness,
        ServedModel, Tokenized,
    },
    chat_syntax::ChatSyntax,
    dispatcher::Dispatcher,
    error::RouterError,
    grammar_check::GrammarChecks,
    reasoning::Thought,
    shard_group::{BLOCK_TOKENS, GroupInfo},
    tokenizer::{TOKEN_CHARS_LEAST, TextPipeline},
    validation::{self, Limits, ValidRequest},
};

/// Stands for the model's length until the shards have told it.
const MODEL_LEN_UNKNOWN: u32 = 2048;

/// What is known of the served model before the shards are up.
#[derive(Clone)]
pub struct FrontSettings {
    pub name: String,
    pub tp: u32,
    pub pp: u32,
    pub max_sequences: u32,
    pub max_batch_tokens: u32,
    pub eos_token_ids: Vec<u32>,
    /// For grammars; `None` for a model without a tokenizer.
    pub grammar_checks: Option<Arc<GrammarChecks>>,
    pub chat_syntax: ChatSyntax,
}

/// Serves requests from one group of shards.
pub struct Front {
    settings: FrontSettings,
    created_s: u64,
    /// `None` for a model without a tokenizer: it takes and gives ids.
    text: Option<TextPipeline>,
    dispatcher: Dispatcher,
}

impl Front {
    pub fn new(
        settings: FrontSettings,
        text: Option<TextPipeline>,
        dispatcher: Dispatcher,
    ) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { settings, created_s: now.as_secs(), text, dispatcher }
    }

    /// The engine's figures, or why there is no use in asking.
    fn engine(&self) -> Result<GroupInfo, RouterError> {
        match self.dispatcher.readiness() {
            Readiness::Draining => return Err(RouterError::ShuttingDown),
            Readiness::Starting(detail) => return Err(RouterError::NotReady(detail)),
            // While lost, requests wait in the queue for the next group.
            Readiness::Ready | Readiness::Lost(_) => {}
        }
        let starting = || RouterError::NotReady("the shards have not started yet".to_owned());
        self.dispatcher.engine().ok_or_else(starting)
    }

    fn limits(&self, max_model_len: u32, vocab_size: u32) -> Limits {
        Limits {
            max_model_len,
            vocab_size,
            token_chars: self.text.as_ref().map_or(TOKEN_CHARS_LEAST, TextPipeline::token_chars),
            eos_token_ids: self.settings.eos_token_ids.clone(),
        }
    }

    fn text(&self, field: &'static str) -> Result<&TextPipeline, RouterError> {
        self.text.as_ref().ok_or_else(|| RouterError::Unsupported {
            field,
            message: format!("{field}: the model has no tokenizer; send token ids"),
        })
    }

    async fn admit(&self, request: GenerateRequest) -> Result<Generation, RouterError> {
        let engine = self.engine()?;
        let limits = self.limits(engine.max_model_len, engine.vocab_size);
        let GenerateRequest { request_id, prompt, parameters } = request;
        let add_special_tokens = parameters.add_special_tokens;
        let mut valid = tracing::info_span!("validate").in_scope(|| {
            if let Prompt::Text(text) = &prompt {
                validation::check_text(text, parameters.truncate.is_some(), &limits)?;
            }
            validation::parameters(parameters, &limits, made_up_seed())
        })?;
        if let Some(constraint) = &valid.constraint {
            self.check_grammar(constraint).instrument(tracing::info_span!("grammar")).await?;
        }
        let ids = self.ids_of(prompt, add_special_tokens, valid.truncate.is_some(), &limits);
        let ids = ids.instrument(tracing::info_span!("tokenize")).await?;
        if let Some(constraint) = &mut valid.constraint {
            self.let_think(constraint, &ids).await?;
            self.dispatcher.compile(constraint).await?;
        }
        let request = validation::fit(request_id, ids, valid, &limits)?;
        self.submit(request).await
    }

    /// The grammar can be used.
    async fn check_grammar(&self, constraint: &Constraint) -> Result<(), RouterError> {
        let Some(checks) = &self.settings.grammar_checks else {
            let field = constraint.field;
            let message = format!("{field}: the model has no tokenizer to apply a grammar with");
            return Err(RouterError::Unsupported { field, message });
        };
        checks.check(constraint).await
    }

    /// Where the model thinks before its answers, the grammar begins after the thought.
    async fn let_think(
        &self,
        constraint: &mut Constraint,
        prompt: &[u32],
    ) -> Result<(), RouterError> {
        let Some(thought) = &constraint.thought else { return Ok(()) };
        let Thought { thinking, open, close } = &**thought;
        let end = self.decode(thinking.end_of(prompt).to_vec()).await?;
        let is_open = thinking.is_open_after(&end);
        constraint.grammar = Arc::new(constraint.grammar.after_thought(is_open, open, close));
        Ok(())
    }

    async fn submit(&self, request: ValidRequest) -> Result<Generation, RouterError> {
        let span = Span::current();
        span.record("gen_ai.usage.input_tokens", request.prompt_ids.len());
        span.record("gen_ai.request.max_tokens", request.max_new_tokens);
        let sampling = &request.parameters.sampling;
        span.record("gen_ai.request.temperature", f64::from(sampling.temperature));
        let (request_id, seed) = (request.request_id.clone(), sampling.seed);
        let prompt_ids = request.prompt_ids.clone();
        let events = self.dispatcher.submit(request, span).await?;
        Ok(Generation { request_id, prompt_ids, seed, events: events.boxed() })
    }

    async fn ids_of(
        &self,
        prompt: Prompt,
        add_special_tokens: Option<bool>,
        truncates: bool,
        limits: &Limits,
    ) -> Result<Vec<u32>, RouterError> {
        match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => {
                let add_special_tokens = add_special_tokens.unwrap_or(true);
                self.text("prompt")?.encode(text, add_special_tokens).await
            }
            Prompt::Conversation(conversation) => {
                let rendered = self.text("messages")?.render(conversation).await?;
                validation::check_text(rendered.text(), truncates, limits)?;
                self.text("messages")?.encode_rendered(rendered).await
            }
        }
    }

    async fn pieces_of(
        &self,
        prompt: Prompt,
        add_special_tokens: Option<bool>,
    ) -> Result<Tokenized, RouterError> {
        let (conversation, text) = match prompt {
            Prompt::Text(text) => (None, text),
            Prompt::Ids(ids) => (None, self.decode(ids).await?),
            Prompt::Conversation(conversation) => (Some(conversation), String::new()),
        };
        let limits = self.dispatcher.engine();
        let limits = limits.map(|engine| self.limits(engine.max_model_len, engine.vocab_size));
        let check = |text: &str| match &limits {
            Some(limits) => validation::check_text(text, false, limits),
            None => Ok(()),
        };
        let Some(conversation) = conversation else {
            check(&text)?;
            return self.text("prompt")?.pieces(text, add_special_tokens.unwrap_or(true)).await;
        };
        let pipeline = self.text("messages")?;
        let rendered = pipeline.render(conversation).await?;
        check(rendered.text())?;
        match add_special_tokens {
            Some(true) => pipeline.pieces(rendered.into_text(), true).await,
            _ => pipeline.rendered_pieces(rendered).await,
        }
    }
}

impl Generator for Front {
    fn generate(&self, request: GenerateRequest) -> BoxFuture<'_, Result<Generation, RouterError>> {
        let span = tracing::info_span!(
            "generate",
            request_id = %request.request_id,
            gen_ai.operation.name = "generate",
            gen_ai.request.model = %self.settings.name,
            gen_ai.request.max_tokens = field::Empty,
            gen_ai.request.temperature = field::Empty,
            gen_ai.usage.input_tokens = field::Empty,
            gen_ai.usage.output_tokens = field::Empty,
            gen_ai.response.finish_reasons = field::Empty,
        );
        self.admit(request).instrument(span).boxed()
    }

    fn encode(
        &self,
        text: String,
        add_special_tokens: bool,
    ) -> BoxFuture<'_, Result<Vec<u32>, RouterError>> {
        async move {
            if let Some(engine) = self.dispatcher.engine() {
                let limits = self.limits(engine.max_model_len, engine.vocab_size);
                validation::check_text(&text, false, &limits)?;
            }
            self.text("text")?.encode(text, add_special_tokens).await
        }
        .boxed()
    }

    fn tokenize(
        &self,
        prompt: Prompt,
        add_special_tokens: Option<bool>,
    ) -> BoxFuture<'_, Result<Tokenized, RouterError>> {
        self.pieces_of(prompt, add_special_tokens).boxed()
    }

    fn decode(&self, ids: Vec<u32>) -> BoxFuture<'_, Result<String, RouterError>> {
        async move {
            let text = self.text("tokens")?;
            // Before the shards are up, their figures are not known.
            let engine = self.dispatcher.engine();
            let (max_model_len, vocab_size) = match &engine {
                Some(engine) => (engine.max_model_len, engine.vocab_size),
                None => (MODEL_LEN_UNKNOWN, text.vocab_size()),
            };
            validation::check_decode(&ids, max_model_len, vocab_size)?;
            text.decode(ids).await
        }
        .boxed()
    }

    fn render(
        &self,
        conversation: Arc<Conversation>,
    ) -> BoxFuture<'_, Result<String, RouterError>> {
        async move { Ok(self.text("messages")?.render(conversation).await?.into_text()) }.boxed()
    }

    fn encode_conversation(
        &self,
        conversation: Arc<Conversation>,
    ) -> BoxFuture<'_, Result<Vec<u32>, RouterError>> {
        async move {
            let text = self.text("messages")?;
            let rendered = text.render(conversation).await?;
            if let Some(engine) = self.dispatcher.engine() {
                let limits = self.limits(engine.max_model_len, engine.vocab_size);
                validation::check_text(rendered.text(), false, &limits)?;
            }
            text.encode_rendered(rendered).await
        }
        .boxed()
    }

    fn model(&self) -> ServedModel {
        let engine = self.dispatcher.engine();
        let engine = engine.as_ref();
        ServedModel {
            name: self.settings.name.clone(),
            created_s: self.created_s,
            tp: self.settings.tp,
            pp: self.settings.pp,
            dtype: engine.map(|engine| engine.dtype.clone()).unwrap_or_default(),
            max_model_len: engine.map_or(0, |engine| engine.max_model_len),
            max_sequences: self.settings.max_sequences,
            max_batch_tokens: self.settings.max_batch_tokens,
            kv_blocks: engine.map_or(0, |engine| engine.num_blocks),
            kv_block_tokens: BLOCK_TOKENS,
        }
    }

    fn chat_syntax(&self) -> ChatSyntax {
        self.settings.chat_syntax.clone()
    }

    fn readiness(&self) -> Readiness {
        self.dispatcher.readiness()
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, Result<(), RouterError>> {
        self.dispatcher.reset_prefix_cache().boxed()
    }

    fn tokenizer_info(&self) -> Option<serde_json::Value> {
        self.text.as_ref()?.info()
    }
}

/// Small enough to survive JSON readers that hold numbers as doubles.
fn made_up_seed() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().1 >> 11
}
