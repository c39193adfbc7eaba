//! Readiness as `grpc.health.v1` tells it.

use tokio::sync::watch;
use tonic_health::{ServingStatus, server::HealthReporter};
use trireme_proto::generate::v1::generation_server::SERVICE_NAME;

use crate::api::Readiness;

/// Mirrors every change, for the server ("") and for the service by its name, until the loop ends.
pub async fn mirror(mut readiness: watch::Receiver<Readiness>, reporter: HealthReporter) {
    loop {
        let status = match readiness.borrow_and_update().is_ready() {
            true => ServingStatus::Serving,
            false => ServingStatus::NotServing,
        };
        reporter.set_service_status("", status).await;
        reporter.set_service_status(SERVICE_NAME, status).await;
        if readiness.changed().await.is_err() {
            reporter.set_service_status("", ServingStatus::NotServing).await;
            return;
        }
    }
}
