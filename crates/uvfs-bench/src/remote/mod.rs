//! `uvfs bench remote`: an object store as a file system, cold and from the cache.

mod alone;
pub mod job;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use uvfs_cli::{Context, Result};

use super::client;
use super::common::{Common, words};
use super::interrupt;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Sample, Say, measure};
use super::server::{Kind, Target, check_names, peer};
use alone::Alone;
use job::{RANDOM, RemoteJob, RemoteWork, SMALL, STREAM};

const EXAMPLES: &str = "\
Examples:
  uvfs bench remote --objects /srv/store/bucket 's3://bucket?endpoint=http://127.0.0.1:9000' --dir /var/tmp
  uvfs bench remote --objects /srv/store/bucket --work stream,stream-again --quick \\
    --peer rclone='rclone mount --vfs-cache-mode full --cache-dir {cache} store:bucket {mountpoint}' \\
    's3://bucket?endpoint=http://127.0.0.1:9000' --dir /var/tmp

The store has to keep its objects as files of a directory, as gateways to a file system do. The benchmark puts
its objects into the store below a name of their own, and removes them from that directory at the end. Each round gives each server an empty cache below
--dir and does the works in their order, the second of a pair with what the first one left in the cache. As root it
drops the kernel's page cache before each work, and reads the store's files into it for the first of a pair, so that
the store answers from memory.

The sides are:
  native     the store's own directory
  opendal    requests to the store by the library that `uvfs mount` uses, as many at a time, without a file system
  mount      `uvfs mount`

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    /// The store, as `uvfs mount` takes it
    source: String,
    /// The directory in which the store has the objects of that bucket and prefix
    #[arg(long, value_name = "DIR")]
    objects: PathBuf,
    /// The works
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "list,small,small-again,stream,stream-again,random"
    )]
    work: Vec<RemoteWork>,
    /// Another option of `uvfs mount`
    #[arg(short = 'o', value_name = "OPTION")]
    options: Vec<String>,
    /// Another file server: it is run without a shell, has to stay in the foreground, and is unmounted at the end.
    /// {cache} is an empty directory
    #[arg(long, value_name = "NAME='COMMAND {mountpoint}'", value_parser = peer)]
    peer: Vec<Target>,
    #[command(flatten)]
    common: Common,
}

/// The side without a file system.
const OPENDAL: &str = "opendal";

/// Reads all of a work's objects, so that the store has them in memory.
fn warm(objects: &Path, work: RemoteWork) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut read = |path: PathBuf| -> io::Result<()> {
        let mut file = File::open(path)?;
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    };
    match work {
        RemoteWork::Stream => read(objects.join(STREAM)),
        RemoteWork::Random => read(objects.join(RANDOM)),
        RemoteWork::Small => {
            (fs::read_dir(objects.join(SMALL))?).try_for_each(|entry| read(entry?.path()))
        }
        _ => Ok(()),
    }
}

/// Empties the kernel's page cache, where that is allowed.
fn drop_pages() {
    rustix::fs::sync();
    let _ = fs::write("/proc/sys/vm/drop_caches", "1");
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let bytes = common.pick(128 << 20, 1 << 30);
    let (names, files) = common.pick((1_000, 100), (10_000, 1_000));
    let workspace = common.workspace(2 * bytes)?;
    let workspace = workspace.over_store(&args.source, &args.objects)?;
    let (name, kind) = (OPENDAL.into(), Kind::Native);
    let mut targets = vec![Target::native(), Target { name, kind }];
    let options = args.options.iter().flat_map(|option| ["-o", option]);
    targets.push(Target::uvfs("mount", &options.collect::<Vec<_>>()));
    targets.extend(args.peer.iter().cloned());
    check_names(&targets)?;
    let (uri, name) = workspace.stored().expect("it is over one");
    let alone = Alone::open(uri, name)?;
    {
        let made = common.workspace(2 * bytes)?;
        let what = || "making objects".into();
        job::fill(&made.source(), bytes, names, files).context(what)?;
        alone.put(&made.source())?;
    }
    let works = args.work.iter().map(|work| {
        let (name, title) = words(work);
        let unit = match work {
            RemoteWork::Stream | RemoteWork::StreamAgain => Unit::MiB,
            _ => Unit::Op,
        };
        Work::new(name, title, unit)
    });
    let works = works.collect();
    let settings = json!({"bytes": bytes, "names": names, "files": files});
    let round = |_, target: &Target, say: Say<'_>| {
        let running = target.start(&workspace)?;
        let mut samples = Vec::new();
        for &work in &args.work {
            interrupt::check()?;
            say(&words(&work).0);
            drop_pages();
            if target.name != "native" {
                warm(&workspace.source(), work).context(|| "the store's files".into())?;
            }
            if target.name == OPENDAL {
                let client = alone.measure(work)?;
                samples.push(client.map(|client| Sample {
                    client,
                    server_cpu_seconds: None,
                }));
                continue;
            }
            let job = client::Job::Remote(RemoteJob {
                path: running.path().into(),
                work,
                files,
            });
            let sample = measure(&running, &job).map_err(|e| running.blame(e))?;
            samples.push(Some(sample));
        }
        Ok(samples)
    };
    common.measure("remote", &targets, works, settings, round)
}
