//! Test images as OCI layouts and wrapped archives.

use super::*;

/// Write an OCI layout with one image of these layers.
pub(super) fn oci_layout(place: &Place, layers: &[Vec<u8>], damage: bool) -> PathBuf {
    let layout = place.directory.path().join("layout");
    fs::create_dir_all(layout.join("blobs/sha256")).expect("made");
    let blob = |bytes: &[u8]| {
        let digest = Digest::of(bytes);
        fs::write(layout.join("blobs/sha256").join(digest.hex()), bytes).expect("written");
        serde_json::json!({"digest": digest.to_string(), "size": bytes.len()})
    };
    let typed = |mut descriptor: serde_json::Value, kind: &str| {
        descriptor["mediaType"] = format!("application/vnd.oci.image.{kind}").into();
        descriptor
    };
    let diff_ids: Vec<String> = layers.iter().map(|bytes| Digest::of(bytes).to_string()).collect();
    let config = serde_json::json!({"architecture": "amd64", "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["sh"], "Entrypoint": ["/init"], "User": "www:8", "WorkingDir": "/srv",
            "Labels": {"a": "b"}},
        "rootfs": {"type": "layers", "diff_ids": diff_ids}, "history": []});
    let config = typed(blob(config.to_string().as_bytes()), "config.v1+json");
    let described: Vec<_> = layers.iter().map(|bytes| typed(blob(bytes), "layer.v1.tar")).collect();
    let manifest = serde_json::json!({"schemaVersion": 2, "config": config, "layers": described});
    let manifest = typed(blob(manifest.to_string().as_bytes()), "manifest.v1+json");
    let mut tagged = manifest.clone();
    tagged["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": "v1"});
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [tagged]});
    fs::write(layout.join("index.json"), index.to_string()).expect("written");
    if damage {
        let path = layout.join("blobs/sha256").join(Digest::of(&layers[0]).hex());
        let mut bytes = fs::read(&path).expect("there");
        let at = bytes.iter().position(|byte| *byte == b'#').expect("a mark");
        bytes[at] = b'!';
        fs::write(&path, bytes).expect("written");
    }
    layout
}

#[test]
fn an_oci_layout_keeps_its_configuration_and_order() {
    let place = Place::new();
    let layers = [archive(|b| file(b, "a", b"#lower")), archive(|b| file(b, "b", b"upper"))];
    let layout = oci_layout(&place, &layers, false);
    let source = format!("oci:{}:v1", layout.display());
    let image = place.store.import("app", &source, &Limits::default(), &mut Silent).expect("imported");
    let digests: Vec<_> = layers.iter().map(|bytes| Digest::of(bytes)).collect();
    assert_eq!(image.layers.iter().map(|l| l.digest.clone()).collect::<Vec<_>>(), digests);
    assert_eq!(image.config.env, ["PATH=/bin"]);
    assert_eq!((image.config.entrypoint[0].as_str(), image.config.cmd[0].as_str()), ("/init", "sh"));
    assert_eq!((image.config.user.as_str(), image.config.working_directory.as_str()), ("www:8", "/srv"));
    assert_eq!(place.store.get("app").expect("kept"), image);
    assert_eq!(place.store.list().expect("listed"), vec![image]);
    let wrong = format!("oci:{}:v2", layout.display());
    let error = place.store.import("other", &wrong, &Limits::default(), &mut Silent).expect_err("no such tag");
    assert!(error.to_string().contains("v1"), "{error}");
}

#[test]
fn a_wrapped_archive_is_an_image_again() {
    let place = Place::new();
    let bytes = archive(|b| file(b, "a", b"content"));
    for (name, stored) in [("plain", bytes.clone()), ("packed", zstd::encode_all(&bytes[..], 1).expect("in memory"))] {
        let path = place.file(&format!("{name}.tar"), &stored);
        let layout = place.directory.path().join(format!("layout-{name}"));
        let config = crate::ImageConfig { cmd: vec!["sh".into()], ..Default::default() };
        crate::write_layout(&path, &layout, "v1", &config, &mut Silent).expect("written");
        let source = format!("oci:{}:v1", layout.display());
        let image = place.store.import(name, &source, &Limits::default(), &mut Silent).expect("imported");
        assert_eq!((image.config, image.layers[0].digest.clone()), (config, Digest::of(&bytes)));
    }
}

#[test]
fn a_damaged_blob_is_named_and_leaves_nothing() {
    let place = Place::new();
    let layout = oci_layout(&place, &[archive(|b| file(b, "a", b"#lower"))], true);
    let source = format!("oci:{}", layout.display());
    let error = place.store.import("app", &source, &Limits::default(), &mut Silent).expect_err("damaged");
    let ImageError::Within { place: named, cause } = error else { panic!("{error}") };
    assert!(matches!(*cause, ImageError::Damaged { .. }) && Path::new(&named) == layout, "{named}: {cause}");
    assert!(place.leftovers().is_empty());
}

#[test]
fn lengths_that_lie_and_blobs_outside_are_refused() {
    let place = Place::new();
    let layers = [archive(|b| file(b, "a", b"#lower"))];
    let import = |place: &Place, layout: &Path| {
        let source = format!("oci:{}", layout.display());
        place.store.import("app", &source, &Limits::default(), &mut Silent)
    };
    let layout = oci_layout(&place, &layers, false);
    import(&place, &layout).expect("honest");
    assert_eq!(place.removed("app", &[]), 1);
    // The manifest's own length in the index, then a layer's in the manifest.
    let index = layout.join("index.json");
    let honest: serde_json::Value = serde_json::from_slice(&fs::read(&index).expect("there")).expect("JSON");
    let mut lying = honest.clone();
    lying["manifests"][0]["size"] = 7.into();
    fs::write(&index, lying.to_string()).expect("written");
    let error = import(&place, &layout).expect_err("a manifest of another length").to_string();
    assert!(error.contains("7"), "{error}");
    let blob = |digest: &str| layout.join("blobs/sha256").join(digest.trim_start_matches("sha256:"));
    let manifest = blob(honest["manifests"][0]["digest"].as_str().expect("a digest"));
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(manifest).expect("there")).expect("JSON");
    manifest["layers"][0]["size"] = 8.into();
    let text = manifest.to_string();
    let digest = Digest::of(text.as_bytes());
    fs::write(blob(&digest.to_string()), &text).expect("written");
    lying["manifests"][0]["size"] = text.len().into();
    lying["manifests"][0]["digest"] = digest.to_string().into();
    fs::write(&index, lying.to_string()).expect("written");
    let error = import(&place, &layout).expect_err("a layer of another length").to_string();
    assert!(error.contains("8"), "{error}");
    // A blob that is a link to a file of the host with the right content is not reached.
    fs::write(&index, honest.to_string()).expect("written");
    let layer = blob(&Digest::of(&layers[0]).to_string());
    let outside = place.file("outside", &layers[0]);
    fs::remove_file(&layer).expect("there");
    std::os::unix::fs::symlink(outside, &layer).expect("linked");
    import(&place, &layout).expect_err("it leads outside");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}
