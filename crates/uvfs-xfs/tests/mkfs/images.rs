//! Images of layers: umoci unpacks the same from them.

use super::archives::{archive, lines, native};
use super::*;
use uvfs_testing::{Need, has};

/// A source at a path, as the command would take it.
fn from(path: &Path) -> From {
    match path.is_dir() {
        true => From::Directory(path.into()),
        false => From::Archives(vec![archive(path)]),
    }
}

/// OCI layouts, archives of them, what Docker saves, and the layers as they are become what umoci unpacks.
#[test]
fn images_of_layers_become_what_umoci_unpacks() {
    if !can_run() || !has(&["python3", "skopeo", "umoci"].map(Need::Program)) {
        return;
    }
    let (dir, (_base, native, since)) = (scratch(), native());
    let at = |name: &str| dir.path().join(name);
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        _ => "arm64",
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mkfs/images.py");
    let list = run(
        "python3",
        &[script.as_ref(), dir.path(), architecture.as_ref()],
    );

    let bundle = native.path().join("bundle");
    let tag = format!("{}:tag", at("one").display());
    run(
        "umoci",
        &["unpack", "--image", &tag, bundle.to_str().unwrap()],
    );
    let expected = lines(&bundle.join("rootfs"), since);
    assert!(expected.len() > 20, "{expected:#?}");

    // Of other programs.
    let copies = ["oci-archive", "docker-archive"].map(|kind| {
        let copy = format!("{kind}:{}:name:latest", at(kind).display());
        let from = format!("oci:{tag}");
        run("skopeo", &["copy", "-q", "--insecure-policy", &from, &copy]);
        (kind, "")
    });
    let image = at("image");
    let check = |what: &str, from: From, refused: &str| {
        let made = make(&image, &MkfsOptions::default(), from);
        if !refused.is_empty() {
            let why = made.err().map(|e| e.to_string()).unwrap_or_default();
            return assert!(why.contains(refused), "{what}: {why}");
        }
        made.unwrap_or_else(|e| panic!("{what}: {e}"));
        sound(&image, what);
        let mount = Mount::new(&image, "ro,norecovery").unwrap();
        same(&lines(mount.path(), since), &expected, what);
        drop(mount);
        fs::remove_file(&image).unwrap();
    };
    let each = list.lines().map(|line| line.split_once('\t').unwrap());
    for (name, refused) in each.chain(copies) {
        check(name, from(&at(name)), refused);
    }
    // A directory of these names that is no layout, and files that would wait for a writer.
    let plain = at("plain");
    fs::create_dir(&plain).unwrap();
    run(
        "mkfifo",
        &[plain.join("oci-layout"), plain.join("index.json")],
    );
    let made = make(&image, &MkfsOptions::default(), from(&plain));
    assert_eq!(made.unwrap().inodes, 5);
    fs::remove_file(&image).unwrap();
    let layers = |order: [usize; 3]| {
        let layer = |i: usize| archive(&at(&format!("layer-{i}")));
        From::Archives(order.map(layer).into())
    };
    check("layers", layers([0, 1, 2]), "");
    let several = vec![archive(&at("layer-0")), archive(&at("oci-archive"))];
    check(
        "an image above",
        From::Archives(several),
        "the first source",
    );
    let image_and_layer = vec![archive(&at("docker-archive")), archive(&at("layer-2"))];
    check("a layer twice", From::Archives(image_and_layer), "");
}
