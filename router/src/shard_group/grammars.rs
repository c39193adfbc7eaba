//! Grammars on their way to the ranks that apply them, beside the steps.

use std::time::Duration;

use futures::future::join_all;
use tonic::Code;
use trireme_grammar::Grammar;
use trireme_proto::shard::v1 as proto;

use super::{GroupError, rank::Connection, wire};

/// A grammar that passed its check compiles in far less.
const COMPILE_LIMIT: Duration = Duration::from_secs(5);

/// The ranks of the last stage.
#[derive(Clone)]
pub struct GrammarRanks {
    ranks: Vec<Connection>,
}

impl GrammarRanks {
    pub(super) fn new(ranks: Vec<Connection>) -> Self {
        Self { ranks }
    }

    /// Has every rank compile it now, so that no step has to wait for that. A rank that cannot be
    /// asked will compile it with its first step.
    ///
    /// # Errors
    /// Why a rank will not have it.
    pub async fn compile(&self, grammar: &Grammar) -> Result<(), String> {
        let request = proto::CompileGrammarRequest { grammar: Some(wire::grammar(grammar)) };
        let calls = self.ranks.iter().map(|rank| {
            let (mut client, request) = (rank.client.clone(), request.clone());
            async move {
                let call = client.compile_grammar(request);
                rank.call("CompileGrammar", COMPILE_LIMIT, call).await
            }
        });
        for outcome in join_all(calls).await {
            match outcome {
                Ok(reply) => tracing::debug!(compile_us = reply.compile_us, "grammar compiled"),
                Err(GroupError::Call { status, .. }) if status.code() == Code::InvalidArgument => {
                    return Err(status.message().to_owned());
                }
                Err(error) => tracing::warn!(%error, "a grammar was not compiled ahead"),
            }
        }
        Ok(())
    }
}
