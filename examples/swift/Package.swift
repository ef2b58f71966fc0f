// swift-tools-version: 6.2
import PackageDescription

let package = Package(
    name: "ask",
    platforms: [.macOS("27.0"), .iOS("27.0")],
    dependencies: [
        .package(url: "https://github.com/apple/coreai-models", from: "0.2.0"),
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.1.0"),
    ],
    targets: [
        .target(
            name: "AFMBundle",
            dependencies: [
                .product(name: "CoreAILM", package: "coreai-models"),
                .product(name: "Transformers", package: "swift-transformers"),
            ]),
        .executableTarget(name: "ask", dependencies: ["AFMBundle"]),
        .testTarget(name: "AFMBundleTests", dependencies: ["AFMBundle"]),
    ]
)
