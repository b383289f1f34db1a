//! Where output leaves the program: text for people, escaped, and JSON for programs, with its version.

use std::io::{self, BufWriter, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde_json::{Value, json as object};

use crate::{Context, Error, Printable, Result, plain, printed};

/// The version of all JSON that the commands write. Fields may be added to a version, and none is removed or changed.
pub const JSON_VERSION: u32 = 1;

/// Errors and warnings are JSON.
static JSON_ERRORS: AtomicBool = AtomicBool::new(false);

/// Makes errors and warnings JSON from now on, as `--json` asks for.
pub fn json_errors(yes: bool) {
    JSON_ERRORS.store(yes, Ordering::Relaxed);
}

fn tell(text: impl FnOnce() -> String, value: impl FnOnce() -> Value) {
    let line = match JSON_ERRORS.load(Ordering::Relaxed) {
        true => format!("{}\n", value()),
        false => text(),
    };
    // There is nowhere to report that standard error can't be written.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Shows an error that ends the command: on standard error, as lines `uvfs: MESSAGE`, or as one JSON object.
pub fn complain(error: &Error) {
    let text = || {
        let lines = error.messages().iter();
        lines.map(|message| format!("uvfs: {message}\n")).collect()
    };
    let value = || {
        object!({
            "version": JSON_VERSION,
            "errors": error.messages(),
            "exit_status": error.code(),
        })
    };
    tell(text, value);
}

/// Says on standard error, in one line, something that does not end the command.
pub fn warn(message: impl AsRef<str>) {
    let message = plain(message.as_ref());
    tell(
        || format!("uvfs: {message}\n"),
        || object!({"version": JSON_VERSION, "warning": message}),
    );
}

/// Prints text. What could drive a terminal is escaped.
///
/// # Errors
/// When standard output can't be written.
pub fn print(text: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(Printable(io::stdout().lock()));
    printed(text(&mut out).and_then(|()| out.flush()))
}

/// Writes the one JSON object of a command, as a line, with its version first.
///
/// # Errors
/// When it can't be written, or is no object.
pub fn json(value: &impl Serialize) -> Result<()> {
    #[derive(Serialize)]
    struct Versioned<'a, T> {
        version: u32,
        #[serde(flatten)]
        value: &'a T,
    }
    let version = JSON_VERSION;
    let text = serde_json::to_string(&Versioned { version, value }).context(|| "JSON".into())?;
    printed(io::stdout().lock().write_all((text + "\n").as_bytes()))
}
