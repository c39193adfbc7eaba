//! An OTLP receiver: keeps every span that a process exports to it.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use anyhow::Result;
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
    trace::v1::Span,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// A span and the service that exported it.
#[derive(Clone, Debug)]
pub struct Exported {
    pub service: String,
    pub span: Span,
}

impl Exported {
    pub fn trace_id(&self) -> String {
        hex(&self.span.trace_id)
    }
    pub fn span_id(&self) -> String {
        hex(&self.span.span_id)
    }
    pub fn parent_id(&self) -> String {
        hex(&self.span.parent_span_id)
    }

    /// An attribute as text.
    pub fn attribute(&self, key: &str) -> Option<String> {
        let value = self.span.attributes.iter().find(|attribute| attribute.key == key)?;
        Some(match value.value.as_ref()?.value.as_ref()? {
            Value::StringValue(text) => text.clone(),
            Value::IntValue(number) => number.to_string(),
            Value::DoubleValue(number) => number.to_string(),
            Value::BoolValue(flag) => flag.to_string(),
            other => format!("{other:?}"),
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The receiver's end for the test.
#[derive(Clone, Default)]
pub struct Receiver {
    spans: Arc<Mutex<Vec<Exported>>>,
}

impl Receiver {
    /// Listens on a free port.
    pub async fn start() -> Result<(Self, SocketAddr)> {
        let receiver = Self::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let service = TraceServiceServer::new(receiver.clone());
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        Ok((receiver, address))
    }

    pub fn spans(&self) -> Vec<Exported> {
        self.spans.lock().expect("no holder of the lock panics").clone()
    }
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.spans.lock().expect("no holder of the lock panics");
        for resource in request.into_inner().resource_spans {
            let service = resource
                .resource
                .iter()
                .flat_map(|resource| &resource.attributes)
                .find(|attribute| attribute.key == "service.name")
                .and_then(|attribute| attribute.value.as_ref()?.value.clone())
                .map(|value| match value {
                    Value::StringValue(text) => text,
                    other => format!("{other:?}"),
                })
                .unwrap_or_default();
            let exported = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            spans.extend(exported.map(|span| Exported { service: service.clone(), span }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}
