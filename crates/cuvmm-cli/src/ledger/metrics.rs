//! `cuvmm metrics`: the figures of `cuvmm top` for a monitoring system.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::process::ExitCode;

use anyhow::anyhow;
use cuvmm::ledger::open_metrics;
use tiny_http::{Header, Method, Request, Response, Server};

use super::find::Where;
use cuvmm_cli::command::usage;
use cuvmm_cli::terminal::{print, safe, tell};

/// The content type of OpenMetrics text.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Print the figures of all processes and tenants as OpenMetrics text
///
/// Prometheus reads this format. Metric names begin with `cuvmm_`; the documentation of
/// `cuvmm::ledger::open_metrics` explains them. With `--listen` it answers GET /metrics until it is
/// interrupted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm metrics
  cuvmm metrics --listen 127.0.0.1:9470
  cuvmm metrics --listen unix:/run/cuvmm/metrics.sock")]
pub(crate) struct Args {
    #[command(flatten)]
    at: Where,

    /// Serve the text at a loopback address or, after `unix:`, a Unix socket
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
}

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// A ledger that cannot be read, and an address that cannot be listened at.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let Some(address) = &self.listen else {
            print(&open_metrics(&self.at.open()?))?;
            return Ok(ExitCode::SUCCESS);
        };
        let server = listen(address)?;
        tell(&format!("serving figures at {}", safe(&shown(&server))));
        for request in server.incoming_requests() {
            self.answer(request);
        }
        Ok(ExitCode::SUCCESS)
    }

    fn answer(&self, request: Request) {
        let path = request.url().split('?').next().unwrap_or_default();
        let response = match (request.method(), path) {
            (Method::Get | Method::Head, "/metrics") => match self.at.open() {
                Ok(ledgers) => with_type(Response::from_string(open_metrics(&ledgers))),
                Err(error) => Response::from_string(format!("{error}\n")).with_status_code(500),
            },
            (Method::Get | Method::Head, _) => {
                Response::from_string("the figures are at /metrics\n").with_status_code(404)
            }
            _ => Response::from_string("only GET is answered\n").with_status_code(405),
        };
        // A client that has gone away needs no answer.
        let _ = request.respond(response);
    }
}

fn with_type<R: std::io::Read>(response: Response<R>) -> Response<R> {
    match Header::from_bytes("Content-Type", CONTENT_TYPE) {
        Ok(header) => response.with_header(header),
        Err(()) => response,
    }
}

fn listen(address: &str) -> anyhow::Result<Server> {
    let failed = |error| anyhow!("{}: {error}", safe(address));
    if let Some(path) = address.strip_prefix("unix:") {
        return Server::http_unix(path.as_ref()).map_err(failed);
    }
    let wrong = || usage(format!("{} is not an address with a port", safe(address)));
    let mut found = address.to_socket_addrs().map_err(|_| wrong())?;
    let address = found.next().ok_or_else(wrong)?;
    if !address.ip().is_loopback() {
        let rule = "names and sizes of this user's processes are served on this machine only";
        return Err(usage(format!("{address} is no loopback address: {rule}")));
    }
    Server::http(address).map_err(failed)
}

fn shown(server: &Server) -> String {
    match server.server_addr().to_ip() {
        Some(address) => url(address),
        None => "the socket".to_owned(),
    }
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}/metrics")
}
