//! Connections to gRPC servers: a unix socket of this instance, or an address that a user gave.

use std::{path::Path, time::Duration};

use anyhow::{Context, bail};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};
use tower::service_fn;

use crate::api_key::ApiKey;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer taken; prompts and answers are far below.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A way to the public API of a server, which shows the key where there is one.
pub type Connection = InterceptedService<Channel, Credentials>;

/// What is shown with every call.
#[derive(Clone, Debug, Default)]
pub struct Credentials(Option<MetadataValue<Ascii>>);

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        Ok(request)
    }
}

/// To a server that asks for no key, as on a control socket.
pub fn keyless(channel: Channel) -> Connection {
    InterceptedService::new(channel, Credentials::default())
}

/// A channel that connects on first use, and again when it was cut.
pub fn unix(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    // The address is never looked up: the connector knows where to go.
    Endpoint::from_static("http://trireme")
        .connect_timeout(CONNECT_TIMEOUT)
        .connect_with_connector_lazy(service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        }))
}

/// `http://HOST:PORT`, `HOST:PORT` or `unix:PATH`.
pub async fn connect(address: &str, key: Option<&ApiKey>) -> anyhow::Result<Connection> {
    let credentials = Credentials(key.and_then(ApiKey::bearer));
    Ok(InterceptedService::new(channel(address).await?, credentials))
}

async fn channel(address: &str) -> anyhow::Result<Channel> {
    if let Some(path) = address.strip_prefix("unix:") {
        if !Path::new(path).exists() {
            bail!("--connect {address}: no such socket");
        }
        return Ok(unix(Path::new(path)));
    }
    let url = match address.split_once("://") {
        None => format!("http://{address}"),
        Some(("http" | "grpc", rest)) => format!("http://{rest}"),
        Some((scheme, _)) => {
            bail!("--connect {address}: scheme '{scheme}' is not one of http, unix")
        }
    };
    Endpoint::from_shared(url)
        .with_context(|| format!("--connect {address} is no address"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .connect()
        .await
        .with_context(|| format!("--connect {address}: no gRPC server answers there"))
}
