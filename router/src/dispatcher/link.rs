//! The loop's end of the shard group: on its way up, or serving.

use futures::{FutureExt, future::BoxFuture};
use tokio::sync::watch;

use crate::{
    api::Readiness,
    shard_group::{GroupError, GroupSettings, ShardGroup, StepResult},
};

type Starting = BoxFuture<'static, Result<ShardGroup, GroupError>>;

pub enum Link {
    Starting(Starting),
    Serving(Box<ShardGroup>),
}

/// What the link has to tell.
pub enum LinkEvent {
    Up(Box<ShardGroup>),
    Step(StepResult),
}

impl Link {
    /// The first start, which has a deadline: what does not come up then was set up wrongly.
    pub fn first(settings: GroupSettings, readiness: watch::Sender<Readiness>) -> Self {
        let limit = settings.start_deadline;
        let latest = readiness.clone();
        let connect = async move {
            let progress = say(readiness, Readiness::Starting);
            ShardGroup::connect(&settings, &mut 0, progress).await
        };
        let start = async move {
            match tokio::time::timeout(limit, connect).await {
                Ok(outcome) => outcome,
                Err(_) => Err(GroupError::NotStarted {
                    limit_s: limit.as_secs(),
                    detail: match &*latest.borrow() {
                        Readiness::Starting(detail) => detail.clone(),
                        _ => String::new(),
                    },
                }),
            }
        };
        Self::Starting(start.boxed())
    }

    /// Ends what is left of a lost group and starts the next one, however long that takes: the
    /// launcher decides when to stop restarting shards.
    pub fn again(
        lost: Option<Box<ShardGroup>>,
        settings: GroupSettings,
        mut epoch: u64,
        readiness: watch::Sender<Readiness>,
    ) -> Self {
        let start = async move {
            if let Some(lost) = lost {
                lost.end().await;
            }
            let progress = say(readiness, Readiness::Lost);
            ShardGroup::connect(&settings, &mut epoch, progress).await
        };
        Self::Starting(start.boxed())
    }

    /// Cancel-safe.
    pub async fn next(&mut self) -> Result<LinkEvent, GroupError> {
        match self {
            Self::Starting(start) => start.await.map(|group| LinkEvent::Up(Box::new(group))),
            Self::Serving(group) => group.next().await.map(LinkEvent::Step),
        }
    }
}

/// Tells readiness how far it is, unless the server is on its way down.
fn say(readiness: watch::Sender<Readiness>, state: fn(String) -> Readiness) -> impl Fn(String) {
    move |detail| {
        let next = state(detail);
        readiness.send_if_modified(|now| {
            let changes = !matches!(now, Readiness::Draining) && *now != next;
            if changes {
                *now = next.clone();
            }
            changes
        });
    }
}
