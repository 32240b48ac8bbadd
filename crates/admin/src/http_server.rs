//! The door: HTTP/1.1 with JSON on a Unix socket that its owner alone may open, on a thread of its own.
//!
//! In: requests of [`crate::words`]. Out: the [`Operator`]'s answers. Nothing here runs on a data core.

use crate::api_types::{AddNamespace, AnaChange, Problem};
use crate::scheduling_api::SchedulingSettings;
use crate::service::{Operator, Refused};
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path as InPath, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, put};
use axum::{Json, Router};
use serde::Serialize;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// How long what was begun may take when the door closes.
const CLOSING: Duration = Duration::from_secs(2);
/// How often the health log is told how the node is, and how many times as rarely the state file.
const NOTE_EVERY: Duration = Duration::from_secs(30);
const KEEP_EVERY: u32 = 20;
/// Threads that wait for data cores and devices in the place of the door's own, and how long one stays without work.
const WAITING_THREADS: usize = 2;
const WAITING_THREAD_IDLE: Duration = Duration::from_secs(2);

/// What runs beside the data cores until this is dropped: the door, where there is one, and notes on the node's
/// health.
pub struct Server {
    path: Option<PathBuf>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Begins, with the door at a path, or without one. A socket that a node left there when it was killed is replaced; one that somebody
    /// answers on is not.
    ///
    /// # Errors
    /// What is in the way.
    pub fn start(path: Option<&Path>, operator: Arc<Operator>) -> io::Result<Server> {
        let listener = path.map(bind).transpose()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(WAITING_THREADS)
            .thread_keep_alive(WAITING_THREAD_IDLE)
            .thread_name("octokv-wait")
            .build()?;
        let (stop, stopped) = watch::channel(false);
        let body = move || {
            if let Err(error) = runtime.block_on(serve(listener, operator, stopped)) {
                tracing::error!(%error, "the administration socket is closed");
            }
        };
        let thread = std::thread::Builder::new().name("octokv-admin".to_owned()).spawn(body)?;
        Ok(Server { path: path.map(Path::to_owned), stop, thread: Some(thread) })
    }
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another node answers there"));
        }
        remove_socket(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Removes a socket, and nothing else: a path that was mistyped may name a file of somebody's.
fn remove_socket(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    if !std::fs::metadata(path)?.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is something that is no socket"));
    }
    std::fs::remove_file(path)
}

impl Drop for Server {
    fn drop(&mut self) {
        // Nobody can connect any more; what was begun is answered.
        let _ = self.path.as_deref().map(remove_socket);
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(
    listener: Option<UnixListener>,
    operator: Arc<Operator>,
    stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let asked = |mut stopped: watch::Receiver<bool>| async move {
        // An error means that the door itself is gone.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let noting = Arc::clone(&operator);
    let notes = async move {
        for count in 1_u32.. {
            tokio::time::sleep(NOTE_EVERY).await;
            let noting = Arc::clone(&noting);
            // A core that does not answer now is asked again the next time.
            let _ = tokio::task::spawn_blocking(move || noting.note_health(count % KEEP_EVERY == 0)).await;
        }
    };
    let listener = listener.map(tokio::net::UnixListener::from_std).transpose()?;
    let until = asked(stopped.clone());
    let server = async move {
        match listener {
            Some(listener) => axum::serve(listener, router(operator)).with_graceful_shutdown(until).await,
            None => {
                until.await;
                Ok(())
            }
        }
    };
    let late = async {
        asked(stopped).await;
        tokio::time::sleep(CLOSING).await;
    };
    tokio::select! {
        served = server => served,
        // Whoever holds a connection open and says nothing does not hold the node.
        () = late => Ok(()),
        () = notes => Ok(()),
    }
}

type Ask = State<Arc<Operator>>;

fn router(operator: Arc<Operator>) -> Router {
    Router::new()
        .route("/v1/namespaces", get(namespaces).post(add_namespace))
        .route("/v1/namespaces/{nsid}", delete(remove_namespace))
        .route("/v1/hosts", get(hosts))
        .route("/v1/hosts/{name}", put(allow).delete(deny))
        .route("/v1/ana", get(ana))
        .route("/v1/ana/{group}", put(set_ana))
        .route("/v1/scheduling", get(scheduling).put(set_scheduling))
        .route("/v1/scheduling/window", get(window))
        .route("/v1/statistics", get(figures))
        .fallback(async || refuse(&Refused::Missing("there is no such path".to_owned())))
        .with_state(operator)
}

fn refuse(refused: &Refused) -> Response {
    let status = match refused {
        Refused::Invalid(_) => StatusCode::BAD_REQUEST,
        Refused::Missing(_) => StatusCode::NOT_FOUND,
        Refused::Exists(_) => StatusCode::CONFLICT,
        Refused::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, Json(Problem { error: refused.to_string() })).into_response()
}

/// Does something that may wait for data cores and devices, away from the thread that answers others.
async fn answer<T: Serialize + Send + 'static>(
    operator: Arc<Operator>,
    work: impl FnOnce(&Operator) -> Result<T, Refused> + Send + 'static,
) -> Response {
    match tokio::task::spawn_blocking(move || work(&operator)).await {
        Ok(Ok(found)) => Json(found).into_response(),
        Ok(Err(refused)) => refuse(&refused),
        Err(error) => refuse(&Refused::Failed(error.to_string())),
    }
}

async fn namespaces(State(operator): Ask) -> Response {
    answer(operator, |operator| Ok(operator.namespaces())).await
}

async fn add_namespace(State(operator): Ask, asked: Result<Json<AddNamespace>, JsonRejection>) -> Response {
    match asked {
        Ok(Json(asked)) => answer(operator, move |operator| operator.add_namespace(&asked)).await,
        Err(error) => refuse(&Refused::Invalid(error.body_text())),
    }
}

async fn remove_namespace(State(operator): Ask, InPath(nsid): InPath<u32>) -> Response {
    answer(operator, move |operator| operator.remove_namespace(nsid)).await
}

async fn hosts(State(operator): Ask) -> Response {
    answer(operator, |operator| Ok(operator.hosts())).await
}

async fn allow(State(operator): Ask, InPath(name): InPath<String>) -> Response {
    answer(operator, move |operator| operator.allow(&name)).await
}

async fn deny(State(operator): Ask, InPath(name): InPath<String>) -> Response {
    answer(operator, move |operator| operator.deny(&name)).await
}

async fn ana(State(operator): Ask) -> Response {
    answer(operator, |operator| Ok(operator.ana())).await
}

async fn set_ana(
    State(operator): Ask,
    InPath(group): InPath<u32>,
    change: Result<Json<AnaChange>, JsonRejection>,
) -> Response {
    match change {
        Ok(Json(AnaChange { state })) => {
            answer(operator, move |operator| operator.set_ana(group, &state)).await
        }
        Err(error) => refuse(&Refused::Invalid(error.body_text())),
    }
}

async fn scheduling(State(operator): Ask) -> Response {
    answer(operator, |operator| Ok(operator.scheduling())).await
}

async fn set_scheduling(
    State(operator): Ask,
    change: Result<Json<SchedulingSettings>, JsonRejection>,
) -> Response {
    match change {
        Ok(Json(change)) => answer(operator, move |operator| operator.set_scheduling(change)).await,
        Err(error) => refuse(&Refused::Invalid(error.body_text())),
    }
}

async fn window(State(operator): Ask) -> Response {
    answer(operator, |operator| operator.window()).await
}

async fn figures(State(operator): Ask) -> Response {
    answer(operator, |operator| Ok(operator.figures())).await
}
