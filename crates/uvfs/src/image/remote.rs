//! Images in object stores.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use uvfs_cli::{Error, Result, duration};
use uvfs_io::engine::Engine;

/// How to read from an object store; options of each command on an image.
#[derive(Args)]
pub struct StoreArgs {
    /// An image in an object store: fail when the store makes no progress for so long [default: 60 s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    timeout: Option<Duration>,
    /// An image in an object store: requests under way at a time, at most [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    requests: Option<u32>,
}

/// The URI that names an image or a store on the command line, if one does.
pub fn uri(path: &Path) -> Option<&str> {
    path.to_str().filter(|path| path.contains("://"))
}

/// The part of a URI, or a path, that may be shown: what follows the `?` of a URI may hold a key.
pub fn shown(path: &Path) -> &Path {
    let name = uri(path).and_then(|uri| uri.split_once('?'));
    name.map_or(path, |(name, _)| Path::new(name))
}

/// Opens an image in a store, whose first failure then ends the command.
pub fn open(uri: &str, args: &StoreArgs) -> Result<Arc<dyn Engine>> {
    engine(uri, args)?.ok_or_else(|| missing(uri))
}

/// The error of a URI that names no object.
pub fn missing(uri: &str) -> Error {
    let name = shown(Path::new(uri)).display();
    Error::new(format!("{name}: there is no such object"))
}

/// How an image is read from a store.
#[cfg(feature = "object")]
pub fn options(timeout: Option<Duration>, requests: Option<usize>) -> uvfs_object::Options {
    let mut options = uvfs_object::Options::default();
    options.timeout = timeout.unwrap_or(options.timeout);
    options.requests = requests.unwrap_or(options.requests);
    options
}

/// The engine that reads the object of a URI; `None` if the store has no object of this very key.
#[cfg(feature = "object")]
fn engine(uri: &str, args: &StoreArgs) -> Result<Option<Arc<dyn Engine>>> {
    use uvfs_cli::Context;

    let options = options(
        args.timeout,
        args.requests.map(|requests| requests as usize),
    );
    let engine = uvfs_object::ObjectEngine::open(uri, &options, true)
        .context(|| shown(Path::new(uri)).display().to_string())?;
    Ok(engine.map(|engine| engine as Arc<dyn Engine>))
}

#[cfg(not(feature = "object"))]
fn engine(uri: &str, _: &StoreArgs) -> Result<Option<Arc<dyn Engine>>> {
    Err(no_stores(uri))
}

/// The error of a URI for a command that knows no stores.
#[cfg(not(feature = "object"))]
pub fn no_stores(uri: &str) -> Error {
    Error::new(format!(
        "{}: this uvfs was built without object stores (cargo build --features object)",
        shown(Path::new(uri)).display()
    ))
}
