//! Readiness as `grpc.health.v1` tells it.

use tokio::sync::watch;
use tonic_health::{ServingStatus, server::HealthReporter};
use trireme_proto::generate::v1::generation_server::SERVICE_NAME;

use crate::api::Readiness;

/// Tells the present state, for the server ("") and for the service by its name.
pub async fn report(readiness: &watch::Receiver<Readiness>, reporter: &HealthReporter) {
    let status = match readiness.borrow().is_ready() {
        true => ServingStatus::Serving,
        false => ServingStatus::NotServing,
    };
    reporter.set_service_status("", status).await;
    reporter.set_service_status(SERVICE_NAME, status).await;
}

/// Mirrors every change until the loop ends.
pub async fn mirror(mut readiness: watch::Receiver<Readiness>, reporter: HealthReporter) {
    loop {
        readiness.mark_unchanged();
        report(&readiness, &reporter).await;
        if readiness.changed().await.is_err() {
            reporter.set_service_status("", ServingStatus::NotServing).await;
            return;
        }
    }
}
