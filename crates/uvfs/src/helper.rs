//! `mount -t fuse.uvfs` and fstab lines: `uvfs install-helper`, and this program as what that installs.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::ValueHint;
use rustix::mount::MountFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use uvfs_cli::{Context, Error, Result};
use uvfs_server::mount::{self, MountLine};

use crate::options::Options;

/// The name by which mount(8) calls the helper.
pub const NAME: &str = "mount.fuse.uvfs";

/// The notes of its manual page, before the options.
pub const PAGE: &str = "\
Examples:
  mount -t fuse.uvfs /srv/data /mnt -o ro,allow_other
  mount -t fuse.uvfs disk.img /mnt -o nosuid,nodev
  mount -o remount,ro /mnt

Fstab:
  /srv/data /mnt fuse.uvfs allow_other 0 0
  /srv/disk.img /mnt/disk fuse.uvfs ro,nosuid,nodev,allow_other,nofail 0 0

mount(8) runs this program, which uvfs install-helper installs, for the type fuse.uvfs. It serves the directory, or the
XFS image, SOURCE at MOUNTPOINT, and returns when the mount answers. Options have the meaning that they have for every
file system: nosuid and nodev hold only when asked for, or when the source is mounted so or is an object store; the mount
point has to be there, and may hold something. uvfs-mount(1) is the same from the command line.

Flags:
  -s             take options that are unknown
  -f             do everything but the mount
  -n, -v         accepted
  -N NAMESPACE   mount in this mount namespace
  -o OPTIONS     options, separated by commas

Exit status: 0 mounted, 1 wrong usage, 32 the mount failed.";

/// Exit statuses of mount(8): wrong usage, and a mount that failed.
const USAGE: u8 = 1;
const FAILED: u8 = 32;

const EXAMPLES: &str = "\
Examples:
  uvfs install-helper
  mount -t fuse.uvfs /srv/data /mnt -o ro,allow_other
  mount -o remount,ro /mnt
  echo '/srv/data /mnt fuse.uvfs allow_other 0 0' >> /etc/fstab

By mount(8), a mount has the words of mount(8) with the meaning they have for every file system: nosuid and
nodev hold only when asked for (or when the source is mounted so, or is an object store), the mount point has to be
there, and remount changes the flags of what is mounted. uvfs mount --help lists the words. The exit status is mount(8)'s.

Exit status: 0 installed, 1 failed, 2 wrong usage.";

/// Install the helper that mount(8) calls.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Where mount(8) looks for helpers
    #[arg(long, default_value = "/sbin", value_hint = ValueHint::DirPath)]
    dir: PathBuf,
    /// Take it away again
    #[arg(long)]
    remove: bool,
}

/// Whether a user other than root may put another file where `path` is. mount(8) runs the helper as root.
fn replaceable(path: &Path) -> io::Result<Option<PathBuf>> {
    for part in path.ancestors() {
        let meta = std::fs::metadata(part)?;
        let by_others = meta.mode() & 0o022 != 0;
        // In a directory with the sticky bit others can't rename root's files.
        let sticky = meta.is_dir() && meta.mode() & 0o1000 != 0;
        if meta.uid() != 0 || (by_others && !sticky) {
            return Ok(Some(part.to_owned()));
        }
    }
    Ok(None)
}

/// Runs it: a symbolic link to this program, which knows its job by the name it is called by.
pub fn run(args: Args) -> Result<ExitCode> {
    let program = std::env::current_exe().context(|| "this program's path".into())?;
    if !args.remove
        && let Some(part) = replaceable(&program).context(|| program.display().to_string())?
    {
        return Err(Error::new(format!(
            "{}: others than root may change {}, and mount(8) would run it as root; install uvfs where \
             only root may write (/usr/local/bin)",
            program.display(),
            part.display()
        )));
    }
    let link = args.dir.join(NAME);
    let name = || link.display().to_string();
    match std::fs::symlink_metadata(&link) {
        Ok(meta) if !meta.is_symlink() => {
            return Err(Error::new(format!(
                "{}: there is a file that is not ours",
                name()
            )));
        }
        Ok(_) => std::fs::remove_file(&link).context(name)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::new(format!("{}: {error}", name()))),
    }
    if !args.remove {
        std::os::unix::fs::symlink(&program, &link).context(name)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether this program was called as the mount helper.
pub fn is_called(argv0: Option<&OsString>) -> bool {
    argv0
        .map(Path::new)
        .and_then(Path::file_name)
        .is_some_and(|name| name == NAME || name == "mount.uvfs")
}

/// How mount(8) calls: `mount.fuse.uvfs SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-t TYPE] [-o OPTIONS]`.
#[derive(Default)]
struct Call {
    source: PathBuf,
    mountpoint: PathBuf,
    lists: Vec<String>,
    namespace: Option<PathBuf>,
    /// Nothing is to be mounted.
    fake: bool,
    sloppy: bool,
}

impl Call {
    fn parse(argv: &[OsString]) -> Result<Self> {
        let mut call = Self::default();
        let mut paths = Vec::new();
        let mut rest = argv.iter().skip(1);
        while let Some(word) = rest.next() {
            let mut value = || {
                rest.next().ok_or_else(|| {
                    Error::usage(format!("{NAME}: {} needs a value", word.display()))
                })
            };
            match word.to_str() {
                Some("-t") => drop(value()?),
                Some("-N") => call.namespace = Some(value()?.into()),
                Some("-o") => {
                    let list = value()?.to_str();
                    let list = list.ok_or_else(|| Error::usage("-o: options are UTF-8 here"))?;
                    call.lists.push(list.to_owned());
                }
                Some(flags) if flags.len() > 1 && flags.starts_with('-') => {
                    call.fake |= flags.contains('f');
                    call.sloppy |= flags.contains('s');
                }
                _ => paths.push(PathBuf::from(word)),
            }
        }
        let Ok([source, mountpoint]) = <[PathBuf; 2]>::try_from(paths) else {
            let usage = format!("usage: {NAME} SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]");
            return Err(Error::usage(usage));
        };
        (call.source, call.mountpoint) = (source, mountpoint);
        Ok(call)
    }
}

/// Does what mount(8) asks for, with its exit statuses.
pub fn called(argv: &[OsString]) -> Result<ExitCode> {
    let call = Call::parse(argv).map_err(|error| error.with_code(USAGE))?;
    // Words that no file system knows are a mount that failed to mount(8).
    act(&call).map_err(|error| error.with_code(FAILED))
}

fn act(call: &Call) -> Result<ExitCode> {
    let (source, mountpoint) = (call.source.as_path(), call.mountpoint.as_path());
    let mut options = Options {
        flags: MountFlags::empty(),
        sloppy: call.sloppy,
        ..Options::default()
    };
    // mount(8) mounts over what is there, for every file system.
    options.nonempty = true;
    let words = || call.lists.iter().flat_map(|list| list.split(','));
    // Where mount(8) knows no options of a mount to change, it takes those of /proc/self/mountinfo.
    let shown = |word: &str| {
        let name = word.split('=').next().unwrap_or_default();
        ["user_id", "group_id", "max_read"].contains(&name)
    };
    let remount = words().any(|word| word == "remount");
    options.parse(words().filter(|word| !remount || !shown(word)))?;
    if let Some(namespace) = &call.namespace {
        let name = || namespace.display().to_string();
        let namespace = File::open(namespace).context(name)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
            .context(name)?;
    }
    if remount {
        return match call.fake {
            true => Ok(ExitCode::SUCCESS),
            false => change(mountpoint, &options),
        };
    }
    let is_store = crate::image::remote::uri(source).is_some();
    if options.nofail && !is_store && !source.exists() {
        return Ok(ExitCode::SUCCESS);
    }
    if !mountpoint.exists() && std::fs::symlink_metadata(mountpoint).is_err() {
        return Err(Error::new(format!(
            "{}: mount point does not exist",
            mountpoint.display()
        )));
    }
    options.flags |= match is_store {
        // Set-user-id bits and devices of a store are those of all who write there.
        true => MountFlags::NOSUID | MountFlags::NODEV,
        false => inherited(source, options.passthrough.xdev)?,
    };
    match call.fake {
        true => Ok(ExitCode::SUCCESS),
        false => crate::mount::start(source, mountpoint, options),
    }
}

/// Changes the flags of what is mounted. The server sees it in /proc/self/mountinfo.
fn change(mountpoint: &Path, options: &Options) -> Result<ExitCode> {
    let name = || mountpoint.display().to_string();
    let path = crate::umount::absolute(mountpoint)?;
    let line = mount::mounted(&path).context(|| "/proc/self/mountinfo".into())?;
    let line = line.filter(|line| line.kind.starts_with("fuse"));
    let line = line.ok_or_else(|| Error::new(format!("{}: not mounted by uvfs", name())))?;
    for (asked, word) in [
        (options.allow_other, "allow_other"),
        (options.default_permissions, "default_permissions"),
    ] {
        if asked && !line.file_system.split(',').any(|has| has == word) {
            return Err(Error::new(format!(
                "{}: {word} can't be changed by a remount (unmount it, and mount it anew)",
                name()
            )));
        }
    }
    rustix::mount::mount_remount(&path, options.flags, "").context(name)?;
    Ok(ExitCode::SUCCESS)
}

/// The restrictions that hold for the source, as for a bind mount of it. A mount below the source
/// may be there for others to fill, and shows in the mount: it is not given more than it has either.
fn inherited(source: &Path, xdev: bool) -> Result<MountFlags> {
    let mut flags = MountFlags::empty();
    let Ok(source) = source.canonicalize() else {
        return Ok(flags);
    };
    if !source.is_dir() {
        return Ok(flags);
    }
    let restrictions = [
        ("nosuid", MountFlags::NOSUID),
        ("nodev", MountFlags::NODEV),
        ("noexec", MountFlags::NOEXEC),
    ];
    let lines = mount::table().context(|| "/proc/self/mountinfo".into())?;
    let restricts = |line: &MountLine| {
        let has = |word: &str| line.options.split(',').any(|option| option == word);
        let set = restrictions.iter().filter(|(word, _)| has(word));
        set.fold(MountFlags::empty(), |all, (_, flag)| all | *flag)
    };
    // Of those mounted at the same place the last one is on top.
    let holds = lines.iter().filter(|line| source.starts_with(&line.at));
    if let Some(line) = holds.max_by_key(|line| line.at.as_os_str().len()) {
        flags |= restricts(line);
    }
    if !xdev {
        let below = lines.iter().filter(|line| line.at.starts_with(&source));
        // Not executing is no protection against what others put there.
        flags |= below.fold(MountFlags::empty(), |all, line| {
            all | (restricts(line) - MountFlags::NOEXEC)
        });
    }
    Ok(flags)
}
