// Flow: the coroutine that a forward is written in.
#pragma once

#include <coroutine>
#include <exception>
#include <optional>
#include <utility>

namespace vlscope {

/// A lazily started coroutine that computes one `T` and can suspend anywhere inside, however deeply
/// it is nested. Awaiting a Flow runs it on the awaiter's behalf by symmetric transfer, so a chain
/// of a thousand calls uses no stack; the whole chain suspends and resumes as one.
///
/// Move-only, and the owner of its frame: destroying a Flow destroys every suspended call below it,
/// and with them whatever they hold. A Flow is awaited once.
template <class T>
class [[nodiscard]] Flow {
 public:
  struct promise_type {
    std::coroutine_handle<> continuation = std::noop_coroutine();
    std::optional<T> value;
    std::exception_ptr error;

    Flow get_return_object() { return Flow(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept { return Return{}; }
    template <class U>
    void return_value(U&& result) {
      value.emplace(std::forward<U>(result));
    }
    void unhandled_exception() noexcept { error = std::current_exception(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Flow() = default;
  Flow(Flow&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Flow& operator=(Flow&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Flow() {
    if (handle_) handle_.destroy();
  }

  /// The handle that starts the coroutine.
  std::coroutine_handle<> handle() const { return handle_; }
  bool done() const { return handle_ && handle_.done(); }

  /// The result of a coroutine that is done. Throws what the coroutine threw.
  T result() {
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return std::move(*handle_.promise().value);
  }

  auto operator co_await() && noexcept {
    struct Call {
      Handle callee;
      bool await_ready() const noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) noexcept {
        callee.promise().continuation = caller;
        return callee;
      }
      T await_resume() {
        if (callee.promise().error) std::rethrow_exception(callee.promise().error);
        return std::move(*callee.promise().value);
      }
    };
    return Call{handle_};
  }

 private:
  /// Hands control back to whoever awaited this coroutine.
  struct Return {
    bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(Handle finished) noexcept {
      return finished.promise().continuation;
    }
    void await_resume() const noexcept {}
  };

  explicit Flow(Handle handle) : handle_(handle) {}
  Handle handle_ = nullptr;
};

}  // namespace vlscope
