//! The listener: accepts connections, serves them, and drains.

use std::{future::Future, time::Duration};

use anyhow::Context as _;
use axum::body::Body;
use hyper::{Request, body::Incoming};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt as _;

use super::{App, first_bytes::FirstBytes, routes};

/// Longest wait for the head of a request, on a new connection and between two requests. Longer
/// than what clients keep an idle connection for, so that it is the client who closes.
const HEAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Pings on HTTP/2, where no head has a limit: a peer that is gone is noticed.
const PING_INTERVAL: Duration = Duration::from_secs(60);
/// Pause when the process has no file descriptor left for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `shutdown` is done, then finishes the requests in flight, for at most `drain`.
///
/// # Errors
/// The listener fails for good.
pub async fn serve(
    listener: TcpListener,
    app: App,
    shutdown: impl Future<Output = ()>,
    drain: Duration,
) -> anyhow::Result<()> {
    let address = listener.local_addr().context("read the HTTP listener's address")?;
    tracing::info!(%address, "HTTP is served");
    let exposition = app.exposition.clone();
    let first_bytes_limit = app.config.first_bytes_limit;
    let routes = routes(app);
    let graceful = GracefulShutdown::new();
    let mut connections = tokio::task::JoinSet::new();
    let upkeep = async {
        match &exposition {
            Some(exposition) => exposition.upkeep().await,
            None => std::future::pending().await,
        }
    };
    let (mut shutdown, mut upkeep) = (std::pin::pin!(shutdown), std::pin::pin!(upkeep));
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _peer)) => {
                    let (routes, watcher) = (routes.clone(), graceful.watcher());
                    connections.spawn(connection(stream, first_bytes_limit, routes, watcher));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            // Ended connections leave the set.
            Some(_) = connections.join_next() => {}
            () = &mut upkeep => {}
            () = &mut shutdown => break,
        }
    }
    drop(listener);
    if tokio::time::timeout(drain, graceful.shutdown()).await.is_err() {
        tracing::warn!(drain_s = drain.as_secs(), "requests were cut at the end of the drain");
    }
    // Dropping the set ends what is left.
    connections.shutdown().await;
    Ok(())
}

async fn connection(
    stream: TcpStream,
    first_bytes_limit: Duration,
    routes: axum::Router,
    watcher: hyper_util::server::graceful::Watcher,
) {
    // An event must not wait for the acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
    let service = TowerToHyperService::new(
        routes.map_request(|request: Request<Incoming>| request.map(Body::new)),
    );
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(PING_INTERVAL);
    let stream = TokioIo::new(FirstBytes::within(first_bytes_limit, stream));
    let serving = builder.serve_connection(stream, service);
    // A client that leaves in the middle is no event of ours.
    if let Err(error) = watcher.watch(serving.into_owned()).await {
        tracing::debug!(%error, "a connection ended early");
    }
}
